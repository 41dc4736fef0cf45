//! A client of the daemon's REST surface, over TCP or a Unix socket.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::Value;

/// Where a daemon is and how to ask it.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    /// The address as people know it.
    place: String,
    token: Option<String>,
}

/// Why there is no good answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address cannot be one.
    #[error("`{url}` is neither http://HOST:PORT nor unix:/PATH")]
    Url {
        /// As it was given.
        url: String,
    },
    /// No daemon answers there.
    #[error("no Engram daemon answers at {place}: {reason}")]
    Unreachable {
        /// The address.
        place: String,
        /// What happened.
        reason: String,
    },
    /// The daemon refused.
    #[error("{message} ({kind}, status {status})")]
    Refused {
        /// Status code.
        status: u16,
        /// `code` of a problem, or `error.type` of a body.
        kind: String,
        /// For people.
        message: String,
        /// The whole body.
        body: Value,
    },
}

// === impl Client ===

impl Client {
    /// A client of the daemon at `url`: `http://HOST:PORT`, or `unix:/PATH` of a socket.
    ///
    /// # Errors
    /// The URL is neither.
    pub fn new(url: &str, token: Option<String>, timeout: Duration) -> Result<Client, ClientError> {
        Self::with(url, token, |builder| builder.timeout(timeout))
    }

    /// The same for what is streamed: no limit for all of it.
    ///
    /// # Errors
    /// The URL is neither.
    pub fn streaming(
        url: &str,
        token: Option<String>,
        connect: Duration,
    ) -> Result<Client, ClientError> {
        Self::with(url, token, |builder| builder.connect_timeout(connect))
    }

    fn with(
        url: &str,
        token: Option<String>,
        limit: impl FnOnce(reqwest::ClientBuilder) -> reqwest::ClientBuilder,
    ) -> Result<Client, ClientError> {
        let bad = || ClientError::Url {
            url: url.to_owned(),
        };
        // A proxy of the environment is never meant for the daemon beside us.
        let builder = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none());
        let builder = limit(builder);
        let (builder, base) = match url.strip_prefix("unix:") {
            Some(path) => {
                let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
                if !path.is_absolute() {
                    return Err(bad());
                }
                (builder.unix_socket(path), "http://localhost".to_owned())
            }
            None => {
                let parsed = reqwest::Url::parse(url).map_err(|_| bad())?;
                if parsed.scheme() != "http" || parsed.host_str().is_none() {
                    return Err(bad());
                }
                (builder, url.trim_end_matches('/').to_owned())
            }
        };
        let http = builder.build().map_err(|_| bad())?;
        let place = url.to_owned();
        Ok(Client {
            http,
            base,
            place,
            token,
        })
    }

    /// Asks and returns the body of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::GET, path, None).await
    }

    /// Sends a JSON body and returns that of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.ask(Method::POST, path, Some(body)).await
    }

    /// Sends a JSON body that changes something, and returns that of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn patch(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.ask(Method::PATCH, path, Some(body)).await
    }

    /// Puts a JSON body in place of what is there, and returns that of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn put(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.ask(Method::PUT, path, Some(body)).await
    }

    /// Deletes what is there, and returns the body of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn delete(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::DELETE, path, None).await
    }

    /// The text of a page that is no JSON, such as `/metrics`.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn text(&self, path: &str) -> Result<String, ClientError> {
        let (status, text) = self.send(Method::GET, path, None).await?;
        if status.is_success() {
            Ok(text)
        } else {
            Err(self.refused(status, &text))
        }
    }

    /// Sends a JSON body and returns the head of a good answer, whose body is still to come.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn open(&self, path: &str, body: &Value) -> Result<reqwest::Response, ClientError> {
        let request = self.request(Method::POST, path).json(body);
        let sent = request.send().await;
        let response = sent.map_err(|error| self.unreachable(&root_cause(&error)))?;
        match response.status() {
            status if status.is_success() => Ok(response),
            status => Err(self.refused(status, &response.text().await.unwrap_or_default())),
        }
    }

    /// Asks for what goes on and on, and returns the head of a good answer, which must come in time.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn follow(
        &self,
        path: &str,
        patience: Duration,
    ) -> Result<reqwest::Response, ClientError> {
        let sent = self.request(Method::GET, path).send();
        let sent = tokio::time::timeout(patience, sent).await;
        let sent = sent.map_err(|_| self.unreachable("no answer in time"))?;
        let response = sent.map_err(|error| self.unreachable(&root_cause(&error)))?;
        match response.status() {
            status if status.is_success() => Ok(response),
            status => Err(self.refused(status, &response.text().await.unwrap_or_default())),
        }
    }

    /// An answer broke off.
    pub fn lost(&self, reason: &str) -> ClientError {
        self.unreachable(reason)
    }

    /// Sends bytes of any length and returns the body of a good answer.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Url`] does not come from here.
    pub async fn send_bytes(
        &self,
        path: &str,
        kind: &'static str,
        body: impl Into<reqwest::Body>,
    ) -> Result<Value, ClientError> {
        let request = self.request(Method::POST, path);
        let request = request
            .header(reqwest::header::CONTENT_TYPE, kind)
            .body(body);
        let (status, text) = self.finish(request).await?;
        self.parse(status, &text)
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, ClientError> {
        let (status, text) = self.send(method, path, body).await?;
        self.parse(status, &text)
    }

    fn parse(&self, status: StatusCode, text: &str) -> Result<Value, ClientError> {
        if !status.is_success() {
            return Err(self.refused(status, text));
        }
        serde_json::from_str(text)
            .map_err(|_| self.unreachable("something else answers there: not JSON"))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, String), ClientError> {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.finish(request).await
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn finish(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<(StatusCode, String), ClientError> {
        let answer = async {
            let response = request.send().await?;
            Ok((response.status(), response.text().await?))
        };
        answer
            .await
            .map_err(|error: reqwest::Error| self.unreachable(&root_cause(&error)))
    }

    fn unreachable(&self, reason: &str) -> ClientError {
        ClientError::Unreachable {
            place: self.place.clone(),
            reason: reason.to_owned(),
        }
    }

    fn refused(&self, status: StatusCode, text: &str) -> ClientError {
        let body: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        let field = |pointer: &str| body.pointer(pointer).and_then(Value::as_str);
        let kind = field("/code").or_else(|| field("/error/type"));
        let Some(kind) = kind.map(str::to_owned) else {
            return self.unreachable(&format!(
                "something else answers there, with status {status}"
            ));
        };
        let message = field("/detail").or_else(|| field("/message"));
        let message = message.or_else(|| field("/error/message"));
        let message = message.unwrap_or_default().to_owned();
        ClientError::Refused {
            status: status.as_u16(),
            kind,
            message,
            body,
        }
    }
}

/// The innermost reason, which says what people need: "Connection refused".
pub fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        let client = |url| Client::new(url, None, Duration::from_secs(1));
        for good in [
            "http://127.0.0.1:7070",
            "http://h:1/",
            "unix:/run/x.sock",
            "unix:///x",
        ] {
            assert!(client(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "127.0.0.1:7070",
            "https://h",
            "unix:",
            "unix:x",
            "ftp://h",
        ] {
            assert!(matches!(client(bad), Err(ClientError::Url { .. })), "{bad}");
        }
    }

    #[tokio::test]
    async fn nobody_there_is_unreachable() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("unix:{}", folder.path().join("none").display());
        let client = Client::new(&url, None, Duration::from_secs(5)).unwrap();
        let error = client.get("/healthz").await.unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }));
        let text = error.to_string();
        assert!(text.contains(&url) && !text.contains("localhost"), "{text}");
    }
}
