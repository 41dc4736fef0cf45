//! The document is what is served, no less and no more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::Value;
use tower::ServiceExt as _;

use super::super::server::Peer;
use super::super::{Config, Metrics, Shared, router};
use crate::telemetry::Readiness;

type Methods = BTreeMap<String, BTreeSet<String>>;

fn app() -> Router {
    let shared = Shared::new(Readiness::default(), Duration::from_secs(5));
    router(&Config::default(), shared, Metrics::default()).unwrap()
}

async fn ask(app: &Router, method: &str, path: &str) -> axum::response::Response {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .extension(Peer::Loopback)
        .body(Body::empty());
    app.clone().oneshot(request.unwrap()).await.unwrap()
}

async fn document(app: &Router) -> Value {
    let response = ask(app, "GET", "/openapi.json").await;
    assert_eq!(response.status(), StatusCode::OK);
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    serde_json::from_slice(&body.unwrap()).unwrap()
}

/// What the document has.
fn documented(document: &Value) -> Methods {
    let paths = document["paths"].as_object().unwrap().iter();
    let methods = paths.map(|(path, item)| {
        let operations = item.as_object().unwrap().keys();
        (
            path.clone(),
            operations.map(|it| it.to_uppercase()).collect(),
        )
    });
    methods.collect()
}

/// What the router has: its routes are shown by its `Debug` alone, each as `RouteId(N): "PATH"`; and
/// its methods by what a refusal of another one allows.
async fn served(app: &Router) -> Methods {
    let shown = format!("{app:?}");
    let mut methods = Methods::new();
    for piece in shown.split("RouteId(").skip(1) {
        let path = piece.split_once("): \"").and_then(|(id, rest)| {
            let number = id.bytes().all(|c| c.is_ascii_digit());
            rest.split_once('"').filter(|_| number)
        });
        let Some((path, _)) = path else { continue };
        // The fallback of whatever is no path.
        if path == "/" || path.contains("__private__") {
            continue;
        }
        // What a pattern takes for its parameter does not matter.
        let response = ask(app, "TRACE", &path.replace(['{', '}'], "")).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        let allow = response.headers()[header::ALLOW].to_str().unwrap();
        let allowed = allow.split(',').map(str::trim).filter(|it| *it != "HEAD");
        methods.insert(path.to_owned(), allowed.map(str::to_owned).collect());
    }
    methods
}

#[tokio::test]
async fn every_route_is_in_the_document_and_the_other_way_round() {
    let app = app();
    let served = served(&app).await;
    assert!(served.len() > 30, "{served:?}");
    assert_eq!(served, documented(&document(&app).await));
}

#[tokio::test]
async fn every_operation_says_what_it_is_and_how_it_fails() {
    let document = document(&app()).await;
    assert_eq!(document["openapi"], "3.1.0");
    let tags = document["tags"].as_array().unwrap().iter();
    let tags: Vec<_> = tags.map(|tag| tag["name"].as_str().unwrap()).collect();
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let place = format!("{method} {path}");
            assert!(operation["summary"].is_string(), "{place}");
            let tag = operation["tags"][0].as_str().unwrap();
            assert!(tags.contains(&tag), "{place}: {tag}");
            let responses = operation["responses"].as_object().unwrap();
            assert!(
                responses.keys().any(|status| status.starts_with('2')),
                "{place}"
            );
            for status in ["400", "401", "404", "405", "413", "415", "500", "503"] {
                assert!(responses.contains_key(status), "{place}: {status}");
            }
            let parts = path.matches('{').count();
            let parameters = operation["parameters"].as_array().unwrap().iter();
            let named = parameters.filter(|it| it["in"] == "path").count();
            assert_eq!(named, parts, "{place}");
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{place}: {id} is taken");
        }
    }
}

#[tokio::test]
async fn every_reference_leads_somewhere() {
    fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|it| references(it, found));
            }
            Value::Array(items) => items.iter().for_each(|it| references(it, found)),
            _ => {}
        }
    }
    let document = document(&app()).await;
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

#[tokio::test]
async fn the_page_asks_nobody_else() {
    let response = ask(&app(), "GET", "/docs").await;
    let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str();
    assert!(policy.unwrap().starts_with("default-src 'none'"));
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    let page = String::from_utf8(body.unwrap().to_vec()).unwrap();
    assert!(page.contains("openapi.json"));
    for foreign in ["http:", "https:", "src=", "@import", "innerHTML", "//"] {
        let lines = page
            .lines()
            .filter(|line| !line.trim_start().starts_with("// "));
        let found: Vec<_> = lines.filter(|line| line.contains(foreign)).collect();
        assert_eq!(found, [""; 0], "{foreign}");
    }
}
