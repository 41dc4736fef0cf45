//! Every path that a source file names, resolved to where it leads.

use crate::lexer::{Kind, Token};

/// A path as the file names it, with what is known about where it leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub line: usize,
    pub path: Path,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// Below the root of this crate. A glob ends in `*`; the root itself is empty.
    Crate(Vec<String>),
    /// Of another crate, or relative to something that the file imports or declares itself.
    Other(Vec<String>),
}

/// What `tokens` name, for a file whose module is `module` (`["store", "disk"]`).
pub fn named(tokens: &[Token], module: &[String]) -> Vec<Named> {
    let mut reader = Reader {
        tokens,
        at: 0,
        modules: vec![module.to_vec()],
        out: Vec::new(),
    };
    let mut depth = 0_usize;
    let mut inline_at = Vec::new();
    while let Some(token) = tokens.get(reader.at) {
        match &token.kind {
            Kind::Punct('{') => depth += 1,
            Kind::Punct('}') => {
                depth = depth.saturating_sub(1);
                if inline_at.last() == Some(&depth) {
                    inline_at.pop();
                    reader.modules.pop();
                }
            }
            Kind::Ident(word) if word == "mod" && reader.punct(2, '{') => {
                if let Some(name) = reader.ident(1) {
                    let mut inner = reader.module().to_vec();
                    inner.push(name.to_string());
                    reader.modules.push(inner);
                    inline_at.push(depth);
                }
            }
            Kind::Ident(word) if word == "use" => {
                reader.at += 1;
                reader.use_tree(Vec::new());
                continue;
            }
            Kind::Ident(_) if !reader.after_path_sep() => {
                reader.inline_path();
                continue;
            }
            _ => {}
        }
        reader.at += 1;
    }
    reader.out
}

struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    /// The module that the current token is in is the last; the file's own is the first.
    modules: Vec<Vec<String>>,
    out: Vec<Named>,
}

// === impl Reader ===

impl<'a> Reader<'a> {
    fn module(&self) -> &[String] {
        self.modules
            .last()
            .expect("the file's own module is never popped")
    }

    fn token(&self, ahead: usize) -> Option<&'a Token> {
        self.tokens.get(self.at + ahead)
    }

    fn ident(&self, ahead: usize) -> Option<&'a str> {
        self.token(ahead).and_then(Token::ident)
    }

    fn punct(&self, ahead: usize, c: char) -> bool {
        self.token(ahead).is_some_and(|t| t.is_punct(c))
    }

    fn path_sep(&self, ahead: usize) -> bool {
        self.token(ahead).is_some_and(|t| t.kind == Kind::PathSep)
    }

    fn after_path_sep(&self) -> bool {
        self.at > 0 && self.tokens[self.at - 1].kind == Kind::PathSep
    }

    fn line(&self) -> usize {
        self.token(0).or(self.tokens.last()).map_or(0, |t| t.line)
    }

    /// One tree of a `use`, after `prefix`; leaves the reader behind it.
    fn use_tree(&mut self, mut prefix: Vec<String>) {
        let line = self.line();
        if self.path_sep(0) {
            self.at += 1;
        }
        loop {
            if self.punct(0, '{') {
                self.at += 1;
                while self.at < self.tokens.len() && !self.punct(0, '}') {
                    self.use_tree(prefix.clone());
                    if self.punct(0, ',') {
                        self.at += 1;
                    } else if !self.punct(0, '}') {
                        return;
                    }
                }
                self.at += 1;
                return;
            } else if self.punct(0, '*') {
                prefix.push("*".into());
                self.at += 1;
                break;
            } else if self.punct(0, '$') {
                self.at += 1;
                continue;
            } else if let Some(word) = self.ident(0) {
                prefix.push(word.into());
                self.at += 1;
            } else {
                break;
            }
            if !self.path_sep(0) {
                break;
            }
            self.at += 1;
        }
        if self.token(0).is_some_and(|t| t.is_ident("as")) {
            self.at += 2;
        }
        self.push(line, prefix);
    }

    /// A path of at least two segments outside a `use`; leaves the reader behind it.
    fn inline_path(&mut self) {
        let line = self.line();
        let mut path = Vec::new();
        while let Some(word) = self.ident(0) {
            path.push(word.to_string());
            self.at += 1;
            if !(self.path_sep(0) && self.ident(1).is_some()) {
                break;
            }
            self.at += 1;
        }
        if path.len() > 1 {
            self.push(line, path);
        }
    }

    fn push(&mut self, line: usize, path: Vec<String>) {
        let path = resolve(self.module(), path);
        self.out.push(Named { line, path });
    }
}

/// Follows `crate`, `self` and `super`, and this crate's own name, from within `module`.
fn resolve(module: &[String], path: Vec<String>) -> Path {
    let mut inside = false;
    let mut at: Vec<String> = Vec::new();
    for (i, segment) in path.into_iter().enumerate() {
        match segment.as_str() {
            "crate" | "engram" if i == 0 => inside = true,
            "self" | "super" if i == 0 => {
                inside = true;
                at = module.to_vec();
                if segment == "super" {
                    at.pop();
                }
            }
            "self" => {}
            "super" => {
                at.pop();
            }
            _ => at.push(segment),
        }
    }
    if inside {
        Path::Crate(at)
    } else {
        Path::Other(at)
    }
}
