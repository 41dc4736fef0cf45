//! Just enough of Rust's grammar to see paths: identifiers and punctuation, no comments, no strings.

/// One token, with the line it stands on (1..).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub kind: Kind,
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An identifier or keyword, without `r#`.
    Ident(String),
    /// `::`
    PathSep,
    /// Any other character that is not white space.
    Punct(char),
    /// A string, character or byte literal, whatever it says.
    Literal,
}

// === impl Token ===

impl Token {
    pub fn is_ident(&self, word: &str) -> bool {
        matches!(&self.kind, Kind::Ident(ident) if ident == word)
    }

    pub fn is_punct(&self, c: char) -> bool {
        self.kind == Kind::Punct(c)
    }

    pub fn ident(&self) -> Option<&str> {
        match &self.kind {
            Kind::Ident(ident) => Some(ident),
            _ => None,
        }
    }
}

/// Splits `source` into tokens. Never fails: what does not compile is not this test's business.
pub fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer {
        chars: source.chars().collect(),
        at: 0,
        line: 1,
        out: Vec::new(),
    };
    while lexer.at < lexer.chars.len() {
        lexer.step();
    }
    lexer.out
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    out: Vec<Token>,
}

// === impl Lexer ===

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn bump(&mut self) -> char {
        let c = self.peek(0);
        self.at += 1;
        if c == '\n' {
            self.line += 1;
        }
        c
    }

    fn push(&mut self, kind: Kind, line: usize) {
        self.out.push(Token { kind, line });
    }

    fn step(&mut self) {
        let line = self.line;
        match (self.peek(0), self.peek(1)) {
            (c, _) if c.is_whitespace() => {
                self.bump();
            }
            ('/', '/') => {
                while self.at < self.chars.len() && self.peek(0) != '\n' {
                    self.bump();
                }
            }
            ('/', '*') => self.block_comment(),
            ('"', _) => self.string(line),
            ('\'', _) => self.quote(line),
            (':', ':') => {
                self.at += 2;
                self.push(Kind::PathSep, line);
            }
            (c, _) if c.is_alphanumeric() || c == '_' => self.word(line),
            (c, _) => {
                self.bump();
                self.push(Kind::Punct(c), line);
            }
        }
    }

    /// Block comments nest.
    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.chars.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => {
                    depth += 1;
                    self.at += 2;
                }
                ('*', '/') => {
                    depth -= 1;
                    self.at += 2;
                    if depth == 0 {
                        return;
                    }
                }
                _ => {
                    self.bump();
                }
            }
        }
    }

    /// A string with escapes, from its opening quote.
    fn string(&mut self, line: usize) {
        self.bump();
        while self.at < self.chars.len() {
            match self.bump() {
                '\\' => {
                    self.bump();
                }
                '"' => break,
                _ => {}
            }
        }
        self.push(Kind::Literal, line);
    }

    /// A raw string, from its first `#` or quote.
    fn raw_string(&mut self, line: usize) {
        let mut hashes = 0;
        while self.peek(0) == '#' {
            hashes += 1;
            self.bump();
        }
        self.bump();
        while self.at < self.chars.len() {
            if self.bump() == '"' && (0..hashes).all(|i| self.peek(i) == '#') {
                self.at += hashes;
                break;
            }
        }
        self.push(Kind::Literal, line);
    }

    /// A character literal or a lifetime, from the quote.
    fn quote(&mut self, line: usize) {
        self.bump();
        let lifetime = self.peek(0) != '\\' && self.peek(1) != '\'';
        if lifetime {
            while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
                self.bump();
            }
            return;
        }
        if self.bump() == '\\' {
            self.bump();
            while self.at < self.chars.len() && self.peek(0) != '\'' {
                self.bump();
            }
        }
        self.bump();
        self.push(Kind::Literal, line);
    }

    /// An identifier or number; or a literal that a prefix such as `br#` opens.
    fn word(&mut self, line: usize) {
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.bump());
        }
        let raw = matches!(word.as_str(), "r" | "br" | "cr");
        match (self.peek(0), self.peek(1)) {
            ('"', _) | ('#', '"' | '#') if raw => self.raw_string(line),
            ('#', _) if word == "r" => {
                self.bump();
                self.word(line);
            }
            ('"', _) if matches!(word.as_str(), "b" | "c") => self.string(line),
            ('\'', _) if word == "b" => self.quote(line),
            _ => self.push(Kind::Ident(word), line),
        }
    }
}
