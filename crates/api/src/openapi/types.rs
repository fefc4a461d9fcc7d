//! Schemas of the types that serialize by hand: ids, scopes, secrets.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::{
    AppId, CommandId, ErrorCode, ImageId, KeyId, RequestId, SandboxId, Scope, SecretText, SessionId, WorkspaceId, scope,
};

macro_rules! ids {
    ($($name:ident: $what:literal;)+) => {$(
        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(Type::String)
                    .pattern(Some(format!("^{}[0-9a-f]{{32}}$", $name::PREFIX)))
                    .description(Some($what))
                    .into()
            }
        }

        impl ToSchema for $name {}
    )+};
}

ids! {
    AppId: "An App's id";
    SessionId: "A Session's id";
    SandboxId: "A Sandbox's id";
    WorkspaceId: "A Workspace's id";
    CommandId: "A Command's id";
    ImageId: "An Image's id";
    KeyId: "A key's id (not the key)";
    RequestId: "A request's id";
}

impl PartialSchema for Scope {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some(scope::words()))
            .description(Some(
                "What a credential may do: an action (`sessions:read`), all of a noun (`sessions:*`), everything but the \
                 App's administration (`*`), or that too (`app:admin`)",
            ))
            .into()
    }
}

impl ToSchema for Scope {}

impl PartialSchema for ErrorCode {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some(ErrorCode::ALL.iter().map(|code| code.as_str())))
            .description(Some("What went wrong, as a word that programs decide by"))
            .into()
    }
}

impl ToSchema for ErrorCode {}

impl PartialSchema for SecretText {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .write_only(true)
            .description(Some("Told once and never shown"))
            .into()
    }
}

impl ToSchema for SecretText {}
