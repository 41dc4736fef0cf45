//! A conversation as people see it: its turns, its branches, what parted from it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::super::Service;
use super::super::api::Selector;
use super::super::by_name::check_names;
use super::super::core::Core;
use super::super::error::ServiceError;
use super::super::rows::tier_of;
use super::super::saving::Policy;
use super::super::workers::seconds;
use super::compared::{Compared, Comparison, Relation};
use super::{Conversation, ConversationKey, Origin, Turn};
use crate::types::{SnapshotId, TierKind};

/// Conversations of one tree.
const MAX_NODES: usize = 10_000;

/// The longest line of conversations that parted from one another.
const MAX_DEPTH: usize = 64;

/// Where a conversation parted from another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct OriginRow {
    /// The other's name.
    pub conversation_id: String,
    /// The last turn that both have.
    pub turn_number: u32,
}

/// One turn.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TurnRow {
    /// Counted from 1.
    pub turn_number: u32,
    /// The request.
    pub rid: String,
    /// The deepest snapshot on its tokens; `None`: it has no state.
    pub snapshot_id: Option<SnapshotId>,
    /// Tokens that the snapshot holds.
    pub boundary: u32,
    /// Tokens of the prompt; the answer has those up to `total_tokens`. `None`: not counted.
    pub prompt_tokens: Option<u32>,
    /// Tokens of prompt and answer.
    pub total_tokens: u32,
    /// Tokens past the boundary: they are prefilled again.
    pub tokens_after_boundary: u32,
    /// How it ended: `stop`, `length`, `abort`, `error`.
    pub finish: &'static str,
    /// When, in unix seconds.
    pub finished_at: f64,
    /// The highest tier that holds all of the snapshot.
    pub tier: Option<TierKind>,
    /// The snapshot survives a crash.
    pub durable: bool,
    /// Branches that name the same snapshot.
    pub branches: Vec<String>,
    /// What somebody called the snapshot.
    pub label: Option<String>,
}

/// One branch.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BranchRow {
    /// Its name.
    pub branch_name: String,
    /// Its snapshot.
    pub snapshot_id: SnapshotId,
    /// The turn that has the snapshot, too; the latest of several.
    pub turn_number: Option<u32>,
    /// It survives a crash.
    pub durable: bool,
}

/// A conversation that parted from this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ForkRow {
    /// Its name.
    pub conversation_id: String,
    /// The last turn that both have.
    pub turn_number: u32,
}

/// One conversation.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ConversationView {
    /// Its name.
    pub conversation_id: String,
    /// Its tenant.
    pub tenant: Option<String>,
    /// No client named it: requests go on with it by their tokens.
    pub unnamed: bool,
    /// Where it parted from another.
    pub origin: Option<OriginRow>,
    /// The turns asked for, ascending.
    pub turns: Vec<TurnRow>,
    /// How many there are in all.
    pub turns_total: usize,
    /// All branches, by name.
    pub branches: Vec<BranchRow>,
    /// What parted from it, by turn.
    pub forks: Vec<ForkRow>,
    /// Its own policy of saving; `None`: the configured one.
    pub policy: Option<Policy>,
    /// Requests under way.
    pub running: usize,
    /// Tokens of the latest turn.
    pub total_tokens: u32,
    /// Last change, in unix seconds.
    pub updated_at: f64,
}

/// A conversation in the tree of all that parted from one another.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TreeNode {
    /// Its name.
    pub conversation_id: String,
    /// It is the one that was asked for.
    pub selected: bool,
    /// Its turns that the one it parted from does not have.
    pub turns: Vec<TreeTurn>,
    /// What parted before any of these turns.
    #[schema(no_recursion)]
    pub forks: Vec<TreeNode>,
}

/// A turn in the tree.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TreeTurn {
    /// Counted from 1.
    pub turn_number: u32,
    /// Tokens of prompt and answer.
    pub total_tokens: u32,
    /// Its snapshot.
    pub snapshot_id: Option<SnapshotId>,
    /// Branches that name that.
    pub branches: Vec<String>,
    /// What parted after this turn.
    #[schema(no_recursion)]
    pub forks: Vec<TreeNode>,
}

// === impl Service ===

impl Service {
    /// One conversation, with `limit` turns after the first `offset`.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`.
    pub fn conversation(
        &self,
        select: &Selector,
        limit: usize,
        offset: usize,
    ) -> Result<ConversationView, ServiceError> {
        check_names(select)?;
        let core = self.core.lock();
        let key = core.conversations.key_of(select)?;
        core.view(&key, limit, offset).ok_or_else(|| unknown(&key))
    }

    /// All that parted from one another around a conversation, from the one that was first.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `Invalid`, too, if there are more than can be shown.
    pub fn tree(&self, select: &Selector) -> Result<TreeNode, ServiceError> {
        check_names(select)?;
        let core = self.core.lock();
        let selected = core.conversations.key_of(select)?;
        let mut planted = Planted::new(&core, &selected);
        let root = planted.root();
        let tree = planted.grow(&root, 0).ok_or_else(|| unknown(&selected))?;
        match planted.left {
            0 => Err(ServiceError::Invalid(format!(
                "more than {MAX_NODES} conversations, or {MAX_DEPTH} in a line, parted from one another"
            ))),
            _ => Ok(tree),
        }
    }

    /// Two turns or branches beside each other.
    ///
    /// # Errors
    /// Those of [`Service::token_stream`].
    pub async fn compare(&self, a: &Selector, b: &Selector) -> Result<Comparison, ServiceError> {
        let (first, second) = (self.token_stream(a).await?, self.token_stream(b).await?);
        let pairs = first.tokens.iter().zip(&second.tokens);
        let common = pairs.take_while(|(one, other)| one == other).count();
        let relation = match (common == first.tokens.len(), common == second.tokens.len()) {
            (true, true) => Relation::Same,
            (false, true) => Relation::AExtendsB,
            (true, false) => Relation::BExtendsA,
            (false, false) => Relation::Parted,
        };
        let common = u32::try_from(common).unwrap_or(u32::MAX);
        let shared = {
            let core = self.core.lock();
            let others = second.snapshot.map(|id| core.line(id)).unwrap_or_default();
            let own = first.snapshot.map(|id| core.line(id)).unwrap_or_default();
            own.into_iter().find(|one| others.contains(one))
        };
        let side = |select: &Selector, stream: &super::TokenStream| Compared {
            conversation_id: select
                .conversation_id
                .clone()
                .or_else(|| select.rid.clone())
                .unwrap_or_default(),
            turn_number: stream.turn,
            tokens: u32::try_from(stream.tokens.len()).unwrap_or(u32::MAX),
            snapshot_id: stream.snapshot,
        };
        Ok(Comparison {
            a: side(a, &first),
            b: side(b, &second),
            common_tokens: common,
            relation,
            common_snapshot: shared.map(|(id, _)| id),
            common_boundary: shared.map_or(0, |(_, boundary)| boundary),
        })
    }
}

// === impl Core ===

impl Core {
    /// A snapshot and those that it goes on from, the deepest first, with their boundaries.
    pub fn line(&self, snapshot: SnapshotId) -> Vec<(SnapshotId, u32)> {
        let mut line = Vec::new();
        let mut next = Some(snapshot);
        while let Some((id, info)) = next.and_then(|id| Some((id, self.index.snapshot(&id)?))) {
            line.push((id, info.boundary));
            next = info.parent;
        }
        line
    }

    /// A conversation, with `limit` turns after the first `offset`.
    pub fn view(
        &self,
        key: &ConversationKey,
        limit: usize,
        offset: usize,
    ) -> Option<ConversationView> {
        let it = self.conversations.get(key)?;
        let names = names_of(it);
        let turns = it.turns.iter().skip(offset).take(limit);
        let children = self.conversations.iter().filter_map(|(other, child)| {
            let origin = child.origin.as_ref()?;
            let its = other.tenant == key.tenant && origin.conversation == key.name;
            its.then(|| ForkRow {
                conversation_id: other.name.to_string(),
                turn_number: origin.turn,
            })
        });
        let mut forks: Vec<ForkRow> = children.collect();
        forks.sort_by(|a, b| {
            (a.turn_number, &a.conversation_id).cmp(&(b.turn_number, &b.conversation_id))
        });
        let branches = it.branches.iter().map(|(name, id)| BranchRow {
            branch_name: name.clone(),
            snapshot_id: *id,
            turn_number: turn_with(it, *id).map(|turn| turn.number),
            durable: self.is_durable(id),
        });
        Some(ConversationView {
            conversation_id: key.name.to_string(),
            tenant: key.tenant.as_deref().map(str::to_owned),
            unnamed: it.unnamed,
            origin: it.origin.as_ref().map(OriginRow::from),
            turns: turns.map(|turn| self.turn_row(turn, &names)).collect(),
            turns_total: it.turns.len(),
            branches: branches.collect(),
            forks,
            policy: it.rules.map(|rules| rules.policy),
            running: it.live.len(),
            total_tokens: it.turns.last().map_or(0, |turn| turn.total_tokens),
            updated_at: seconds(it.updated),
        })
    }

    fn turn_row(&self, turn: &Turn, names: &BTreeMap<SnapshotId, Vec<String>>) -> TurnRow {
        let info = turn.snapshot.and_then(|id| self.index.snapshot(&id));
        let mark = turn.snapshot.and_then(|id| self.conversations.mark_of(id));
        TurnRow {
            turn_number: turn.number,
            rid: turn.rid.to_string(),
            snapshot_id: turn.snapshot,
            boundary: turn.boundary,
            prompt_tokens: turn.prompt_tokens,
            total_tokens: turn.total_tokens,
            tokens_after_boundary: turn.total_tokens.saturating_sub(turn.boundary),
            finish: turn.finish,
            finished_at: seconds(turn.finished),
            tier: info.as_ref().map(tier_of),
            durable: turn.snapshot.is_some_and(|id| self.is_durable(&id)),
            branches: branches_of(turn, names),
            label: mark.and_then(|mark| mark.label.as_deref().map(str::to_owned)),
        }
    }
}

/// The tree while it grows.
struct Planted<'a> {
    core: &'a Core,
    selected: &'a ConversationKey,
    /// What parted from each conversation, by name.
    children: HashMap<&'a str, Vec<&'a ConversationKey>>,
    seen: HashSet<Arc<str>>,
    /// Conversations that it may still have.
    left: usize,
}

// === impl Planted ===

impl<'a> Planted<'a> {
    fn new(core: &'a Core, selected: &'a ConversationKey) -> Self {
        let mut children: HashMap<&str, Vec<&ConversationKey>> = HashMap::new();
        for (key, it) in core.conversations.iter() {
            if let Some(origin) = &it.origin
                && key.tenant == selected.tenant
            {
                children.entry(&origin.conversation).or_default().push(key);
            }
        }
        children.values_mut().for_each(|keys| keys.sort_unstable());
        Self {
            core,
            selected,
            children,
            seen: HashSet::new(),
            left: MAX_NODES,
        }
    }

    /// The first of all: a name that was deleted and given again may lead round in a circle.
    fn root(&self) -> ConversationKey {
        let mut seen = HashSet::new();
        let mut key = self.selected.clone();
        loop {
            let above = self.core.conversations.get(&key);
            let above = above
                .and_then(|it| it.origin.as_ref())
                .map(|origin| ConversationKey {
                    tenant: key.tenant.clone(),
                    name: Arc::clone(&origin.conversation),
                });
            match above {
                Some(above)
                    if self.core.conversations.get(&above).is_some()
                        && seen.insert(key.clone())
                        && !seen.contains(&above) =>
                {
                    key = above;
                }
                _ => return key,
            }
        }
    }

    /// `None`: it is there already, or there are too many.
    fn grow(&mut self, key: &ConversationKey, depth: usize) -> Option<TreeNode> {
        if depth >= MAX_DEPTH {
            self.left = 0;
        }
        let it = self.core.conversations.get(key)?;
        if !self.seen.insert(Arc::clone(&key.name)) {
            return None;
        }
        self.left = self.left.checked_sub(1)?;
        let above = it.origin.as_ref().and_then(|origin| {
            let above = ConversationKey {
                tenant: key.tenant.clone(),
                name: Arc::clone(&origin.conversation),
            };
            self.core.conversations.get(&above)
        });
        let names = names_of(it);
        let own = it.turns.iter().filter(|turn| !has(above, turn));
        let mut turns: Vec<TreeTurn> = own
            .map(|turn| TreeTurn {
                turn_number: turn.number,
                total_tokens: turn.total_tokens,
                snapshot_id: turn.snapshot,
                branches: branches_of(turn, &names),
                forks: Vec::new(),
            })
            .collect();
        let mut forks = Vec::new();
        let children = self.children.get(&*key.name).cloned().unwrap_or_default();
        for child in children {
            let origin = self.core.conversations.get(child)?.origin.clone();
            let Some(node) = self.grow(child, depth + 1) else {
                continue;
            };
            let after = origin.map_or(0, |origin| origin.turn);
            match turns
                .iter_mut()
                .rev()
                .find(|turn| turn.turn_number <= after)
            {
                Some(turn) => turn.forks.push(node),
                None => forks.push(node),
            }
        }
        Some(TreeNode {
            conversation_id: key.name.to_string(),
            selected: key == self.selected,
            turns,
            forks,
        })
    }
}

// === impl OriginRow ===

impl From<&Origin> for OriginRow {
    fn from(origin: &Origin) -> Self {
        Self {
            conversation_id: origin.conversation.to_string(),
            turn_number: origin.turn,
        }
    }
}

/// A fork has the turns up to where it parted, too.
fn has(above: Option<&Conversation>, turn: &Turn) -> bool {
    let same = above.and_then(|it| it.turn(turn.number));
    same.is_some_and(|same| same.rid == turn.rid && same.total_tokens == turn.total_tokens)
}

fn turn_with(it: &Conversation, snapshot: SnapshotId) -> Option<&Turn> {
    let mut turns = it.turns.iter().rev();
    turns.find(|turn| turn.snapshot == Some(snapshot))
}

fn names_of(it: &Conversation) -> BTreeMap<SnapshotId, Vec<String>> {
    let mut names: BTreeMap<SnapshotId, Vec<String>> = BTreeMap::new();
    for (name, id) in &it.branches {
        names.entry(*id).or_default().push(name.clone());
    }
    names
}

fn branches_of(turn: &Turn, names: &BTreeMap<SnapshotId, Vec<String>>) -> Vec<String> {
    let names = turn.snapshot.and_then(|id| names.get(&id));
    names.cloned().unwrap_or_default()
}

fn unknown(key: &ConversationKey) -> ServiceError {
    ServiceError::NotFound {
        what: "conversation",
        name: key.name.to_string(),
    }
}
