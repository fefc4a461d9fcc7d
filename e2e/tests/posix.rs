//! What POSIX says of files, in a Workspace as on a disk of the guest's own. Each difference is in a table, with its reason.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "measured times are for whoever reads the run")]

use pepo_api::CreateSession;
use pepo_e2e::durable::Up;

/// The program, and the table of what differs.
const PROGRAM: [(&str, &str); 6] = [
    ("__main__.py", include_str!("guest/posix/__main__.py")),
    ("tools.py", include_str!("guest/posix/tools.py")),
    ("names.py", include_str!("guest/posix/names.py")),
    ("rights.py", include_str!("guest/posix/rights.py")),
    ("contents.py", include_str!("guest/posix/contents.py")),
    ("differences.txt", DIFFERENCES),
];

const DIFFERENCES: &str = include_str!("guest/posix/differences.txt");

const DOCUMENT: &str = include_str!("../../docs/workspaces.md");

#[tokio::test]
async fn cases_of_posix_come_to_the_same_as_on_a_disk() {
    let up = Up::start();
    // A Session's own: the one whose guest trusts what it knows the longest.
    let session = up.client.session_create(&CreateSession::default()).await.expect("a Session").id.to_string();
    up.ok(&session, "mkdir /tmp/posix").await;
    for (name, text) in PROGRAM {
        up.put(&session, &format!("posix/{name}"), text).await;
    }
    assert_eq!(up.ok(&session, "stat -f -c %T /tmp").await, "ext2/ext3\n", "the reference is no disk");
    let line = "sudo python3 /tmp/posix /tmp/reference /workspace/cases /tmp/posix/differences.txt";
    let (code, said) = up.sh(&session, line).await;
    println!("{said}");
    assert_eq!(code, 0, "{said}");
    // The reference has met what there is to be met: a program that failed early would prove nothing.
    for error in [
        "EACCES",
        "EBADF",
        "EBUSY",
        "EEXIST",
        "EFBIG",
        "EINVAL",
        "EISDIR",
        "ELOOP",
        "ENAMETOOLONG",
        "ENODATA",
        "ENOENT",
        "ENOTDIR",
        "ENOTEMPTY",
        "ENXIO",
        "EPERM",
        "ERANGE",
        "EROFS",
        "ESPIPE",
        "ETXTBSY",
        "EXDEV",
    ] {
        assert!(said.contains(&format!(" {error}:")), "no case came to {error}: {said}");
    }
    let cases = said.lines().find_map(|line| line.split_once(" cases, ")?.0.parse::<usize>().ok());
    assert!(cases.is_some_and(|cases| cases > 2900), "{said}");
    up.client.session_terminate(&session).await.expect("terminate");
    up.end().await;
}

#[test]
fn each_difference_has_its_reason_in_the_document() {
    let rows = DIFFERENCES.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut count = 0;
    for row in rows {
        let [_cases, _outcome, reason] = row.split(" | ").collect::<Vec<_>>()[..] else { panic!("{row}") };
        let told = DOCUMENT.lines().any(|line| line.starts_with(&format!("| {} |", reason.trim())));
        assert!(told, "docs/workspaces.md has no row `{reason}`");
        count += 1;
    }
    assert!(count > 0, "no difference is in the table");
}
