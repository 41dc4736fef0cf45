//! Calls, at random.

use proptest::prelude::*;

use super::*;

/// How the KV of a new snapshot is made.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Leave this much of what is stored unused, and store it again.
    pub(super) overlap: u32,
    /// A cut inside the new KV, in tokens from its start.
    pub(super) cut: u32,
    /// Tokens of the last new object beyond the boundary.
    pub(super) beyond: Vec<TokenId>,
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    Insert {
        key: u8,
        /// Which known prompt to extend, how much of it to take, and by what.
        base: (usize, usize, Vec<TokenId>),
        shape: Shape,
        tier: TierKind,
        retain: Retain,
        durable: bool,
        late: bool,
    },
    Repeat(usize),
    Lookup(u8, Vec<TokenId>, u32),
    Touch(usize),
    Forget(usize),
    Remove(usize),
    Lose(usize),
    ForgetObject(usize),
    SetTier(usize, TierKind, bool),
    Evict(TierKind, u64),
    Lease(usize),
    Release(usize),
    Pin(usize, Option<u64>),
    Unpin(usize, PinKind),
    SetRetain(usize, Retain),
    SetDurable(usize, bool),
    Restart(usize),
}

fn tokens(len: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<TokenId>> {
    prop::collection::vec(0..2_u32, len)
}

fn tier() -> impl Strategy<Value = TierKind> {
    prop::sample::select(TierKind::ALL.to_vec())
}

fn retain() -> impl Strategy<Value = Retain> {
    prop::sample::select(vec![Retain::Transient, Retain::Ordinary, Retain::Promised])
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let n = any::<usize>;
    let shape = (0..4_u32, 0..4_u32, tokens(0..=3)).prop_map(|(overlap, cut, beyond)| Shape {
        overlap,
        cut,
        beyond,
    });
    let insert = (
        1..3_u8,
        (n(), n(), tokens(0..=4)),
        shape,
        tier(),
        retain(),
        any::<bool>(),
        any::<bool>(),
    );
    prop_oneof![
        12 => insert.prop_map(|(key, base, shape, tier, retain, durable, late)| Op::Insert {
            key, base, shape, tier, retain, durable, late
        }),
        1 => n().prop_map(Op::Repeat),
        2 => (1..3_u8, tokens(0..=12), 0..14_u32).prop_map(|(k, t, max)| Op::Lookup(k, t, max)),
        2 => n().prop_map(Op::Touch),
        2 => n().prop_map(Op::Forget),
        2 => n().prop_map(Op::Remove),
        1 => n().prop_map(Op::Lose),
        1 => n().prop_map(Op::ForgetObject),
        4 => (n(), tier(), any::<bool>()).prop_map(|(n, t, there)| Op::SetTier(n, t, there)),
        3 => (tier(), 0..5000_u64).prop_map(|(tier, bytes)| Op::Evict(tier, bytes)),
        2 => n().prop_map(Op::Lease),
        2 => n().prop_map(Op::Release),
        2 => (n(), prop::option::of(0..20_u64)).prop_map(|(n, until)| Op::Pin(n, until)),
        1 => (n(), prop::sample::select(vec![PinKind::Timed, PinKind::Named]))
            .prop_map(|(n, kind)| Op::Unpin(n, kind)),
        1 => (n(), retain()).prop_map(|(n, retain)| Op::SetRetain(n, retain)),
        1 => (n(), any::<bool>()).prop_map(|(n, durable)| Op::SetDurable(n, durable)),
        1 => n().prop_map(Op::Restart),
    ]
}
