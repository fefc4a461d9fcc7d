//! Rows of ports: what a program inside answers over HTTP, and who may ask it.

use super::{Reach, Shape};
use crate::{PublishPort, PublishedPort};

/// The shape of the row with that name.
pub(super) fn of(name: &str) -> Option<Shape> {
    const ABOUT: &str = "Path, query and body reach the program that listens on that port, and its status, headers and body \
        come back; any status may. What authenticated the caller does not reach it, nor do headers of the connection and \
        `Pepo-`, `Forwarded` and `X-Forwarded-` headers. From its answer are taken: `Set-Cookie`, `Clear-Site-Data`, \
        `Service-Worker-Allowed`, `Access-Control-…`, `Pepo-…`; put in: `Content-Security-Policy: sandbox`. A `Location` \
        on that port leads there again. `Upgrade: websocket` is passed on. Where `edge.domain` is set, the port has a host name of its \
        own too, and is answered there for all paths.";
    let says = |summary| Shape::new(summary).also(&[409, 410]);
    match name {
        "port_list" => return Some(says("List the published ports of a Session").page::<PublishedPort>()),
        "port_publish" => {
            let shape = says("Publish a port: whoever has its address reaches it").about(
                "Where the operator set `edge.domain`. Until it expires, the Session ends, or it is withdrawn, requests to its \
                 host name need no credential. Once more sets a new end.",
            );
            return Some(shape.may_have::<PublishPort>().json::<PublishedPort>(200));
        }
        "port_withdraw" => {
            let shape = says("Withdraw a published port: when this is answered it takes a credential again");
            return Some(shape.plain(204));
        }
        _ => {}
    }
    let method = name.strip_prefix("port_")?;
    let summary = match method {
        "get" => "Ask a program inside over HTTP: GET",
        "head" => "The same: HEAD",
        "options" => "The same: OPTIONS",
        "post" => "The same: POST",
        "put" => "The same: PUT",
        "patch" => "The same: PATCH",
        "delete" => "The same: DELETE",
        _ => return None,
    };
    let shape = Shape::new(summary).about(ABOUT).reach(Reach::Guest).plain(200);
    Some(if method == "get" { shape.plain(101) } else { shape })
}
