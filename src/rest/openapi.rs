//! `/openapi.json`: the OpenAPI 3.1 document, made from the handlers; and `/docs`, a page that shows
//! it without asking anybody else.
//!
//! Routes and schemas come from the annotations beside each handler, as the router is built from the
//! same. What holds for all of them is added here: errors in the shape of their surface, the token,
//! the request id.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::http::{HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, Header, ObjectBuilder, Ref, RefOr, Required,
    ResponseBuilder, Schema, SecurityRequirement, Type,
};
use utoipa::{OpenApi, ToSchema};

use super::error::ErrorType;
use super::problem::{Failure, OpenAiFailure, PROBLEM_JSON, Problem};
use super::surface::Surface;

/// The page.
const PAGE: &str = include_str!("docs.html");

/// The page asks for the document, and for nothing else.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Paths that are served without the token while `rest.open_probes` holds.
pub(super) const OPEN: [&str; 5] = ["/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"];

/// The document without its paths.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Engram",
        description = "A durable memory for language models with a recurrent state, beside an \
                       unmodified SGLang. Names in a path are percent-encoded, `/` as `%2F`. Errors \
                       of the native surface are problem details (RFC 9457).",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "snapshots", description = "What is stored"),
        (name = "conversations", description = "What names it: turns, branches, forks"),
        (name = "generate", description = "Go on with a conversation; only what is new is sent"),
        (name = "portable", description = "Snapshots as files"),
        (name = "tiers", description = "Where bytes are kept"),
        (name = "daemon", description = "The daemon and its workers"),
        (name = "events", description = "What happens, as it happens"),
        (name = "compatible", description = "What clients of snapshot servers know, at the root"),
        (name = "passed", description = "Answered by the inference server itself"),
        (name = "probes", description = "For those who run it"),
    )
)]
struct Base;

/// The document to which the router adds its paths.
pub(super) fn base() -> utoipa::openapi::OpenApi {
    let mut document = Base::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").to_owned();
    document
}

/// The text of the document, in handlers.
#[derive(Clone, Debug)]
pub struct Document(Bytes);

impl Document {
    /// The document with what holds for every operation.
    pub(super) fn finish(mut document: utoipa::openapi::OpenApi) -> Self {
        for (path, item) in &mut document.paths.paths {
            for (method, operation) in operations(item) {
                // As they are in no other document, and the same for ever.
                operation.operation_id = Some(id_of(method, path));
                complete(path, operation);
            }
        }
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.take().unwrap_or_default();
        let mut more = Vec::new();
        Problem::schemas(&mut more);
        Failure::schemas(&mut more);
        OpenAiFailure::schemas(&mut more);
        let components = ComponentsBuilder::from(components)
            .schema_from::<Problem>()
            .schema_from::<Failure>()
            .schema_from::<OpenAiFailure>()
            .schemas_from_iter(more)
            .security_scheme("token", SecurityScheme::Http(bearer))
            .build();
        document.components = Some(components);
        // A derived value of texts and numbers: it cannot fail.
        Self(document.to_json().unwrap_or_default().into())
    }

    /// The text.
    pub(super) fn layer(self) -> Extension<Arc<Self>> {
        Extension(Arc::new(self))
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (&'static str, &mut Operation)> {
    let all = [
        ("get", &mut item.get),
        ("put", &mut item.put),
        ("post", &mut item.post),
        ("patch", &mut item.patch),
        ("delete", &mut item.delete),
    ];
    let all = all.into_iter();
    all.filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// `get_v1_conversations_conversation_id` of a method and a path.
fn id_of(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let words = words.filter(|word| !word.is_empty());
    std::iter::once(method)
        .chain(words)
        .collect::<Vec<_>>()
        .join("_")
}

/// Errors, the token and the request id.
fn complete(path: &str, operation: &mut Operation) {
    let surface = Surface::of(path);
    let mut statuses: Vec<u16> = ErrorType::ALL
        .iter()
        .map(|kind| kind.status().as_u16())
        .collect();
    statuses.sort_unstable();
    statuses.dedup();
    for status in statuses {
        let key = status.to_string();
        if operation.responses.responses.contains_key(&key) {
            continue;
        }
        let of_status = |kind: &&ErrorType| kind.status().as_u16() == status;
        let all = ErrorType::ALL;
        let kinds: Vec<_> = all.iter().filter(of_status).map(|it| it.as_str()).collect();
        let (kind, schema) = match surface {
            Surface::Native => (PROBLEM_JSON, Ref::from_schema_name("Problem")),
            Surface::Compatible => ("application/json", Ref::from_schema_name("Failure")),
            Surface::OpenAi => ("application/json", Ref::from_schema_name("OpenAiFailure")),
        };
        let passes = operation.tags.as_ref();
        let passes =
            passes.is_some_and(|tags| tags.iter().any(|tag| tag == "passed" || tag == "generate"));
        let ours = ContentBuilder::new().schema(Some(schema)).build();
        let theirs = || ContentBuilder::new().build();
        let response = ResponseBuilder::new().description(kinds.join(", "));
        // What the inference server says against a request is said in its own words.
        let response = match (passes, kind) {
            (false, _) => response.content(kind, ours),
            (true, PROBLEM_JSON) => response
                .content(kind, ours)
                .content("application/json", theirs()),
            (true, _) => response.content(kind, theirs()),
        };
        let response = response.build();
        operation
            .responses
            .responses
            .insert(key, RefOr::T(response));
    }
    for response in operation.responses.responses.values_mut() {
        if let RefOr::T(response) = response {
            let text = RefOr::<Schema>::T(ObjectBuilder::new().schema_type(Type::String).into());
            let mut id = Header::new(text);
            id.description = Some("The request's id, as it stands in the log".to_owned());
            response
                .headers
                .insert("x-request-id".to_owned(), RefOr::T(id));
        }
    }
    let text = ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(Some(1))
        .max_length(Some(128));
    let id = ParameterBuilder::new()
        .name("x-request-id")
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(
            "An id for the log, given back; a fresh one without it",
        ))
        .schema(Some(text))
        .build();
    operation
        .parameters
        .get_or_insert_default()
        .push(RefOr::T(id));
    let token = SecurityRequirement::new::<_, [&str; 0], &str>("token", []);
    // With no token configured none is needed.
    operation.security = Some(vec![SecurityRequirement::default(), token]);
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "probes",
    responses((status = 200, body = Object, content_type = "application/json"))
)]
pub async fn document(Extension(document): Extension<Arc<Document>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, document.0.clone()).into_response()
}

/// A page that shows this document.
#[utoipa::path(
    get,
    path = "/docs",
    tag = "probes",
    responses((status = 200, body = String, content_type = "text/html"))
)]
pub async fn page() -> Response {
    let policy = HeaderValue::from_static(PAGE_POLICY);
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(PAGE)).into_response()
}

#[cfg(test)]
mod tests;
