//! Files of Workspaces without a Session: no microVM runs here, and what touches the files is jailed all the same.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use pepo_api::client::{ByteStream, Client, ClientError, body_from};
use pepo_api::query::{AtPath, RemoveWorkspace, UnderPath, WriteFile};
use pepo_api::{
    AppQuota, CreateApp, CreateWorkspace, ErrorCode, FileKind, MakeFile, RenameFile, RestoreReport, UpdateWorkspace,
};
use pepo_e2e::{Instance, until};

const LIMIT: Duration = Duration::from_secs(60);

fn at(path: &str) -> AtPath {
    AtPath { path: path.into(), user: None }
}

async fn all(mut stream: ByteStream) -> Result<Vec<u8>, ClientError> {
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

async fn put(client: &Client, workspace: &str, path: &str, bytes: &[u8]) -> Result<(), ClientError> {
    let query = WriteFile { path: path.into(), ..WriteFile::default() };
    client.workspace_file_write(workspace, &query, body_from(bytes.to_vec())).await
}

async fn get(client: &Client, workspace: &str, path: &str) -> Result<Vec<u8>, ClientError> {
    all(client.workspace_file_read(workspace, &at(path)).await?).await
}

fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Option<ErrorCode> {
    result.expect_err("it was not refused").code()
}

/// A tar of these entries: kind, name, link or bytes.
fn archive(entries: &[(u8, &str, &[u8])]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (kind, name, bytes) in entries {
        let is_file = *kind == b'0';
        let mut header = [0_u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..107].copy_from_slice(b"0006755");
        for field in [108, 116] {
            header[field..field + 7].copy_from_slice(b"0001750");
        }
        let size = format!("{:011o}", if is_file { bytes.len() } else { 0 });
        header[124..135].copy_from_slice(size.as_bytes());
        header[136..147].copy_from_slice(b"00000000000");
        header[156] = *kind;
        if !is_file {
            header[157..157 + bytes.len()].copy_from_slice(bytes);
        }
        header[257..265].copy_from_slice(b"ustar  \0");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        tar.extend_from_slice(&header);
        if is_file {
            tar.extend_from_slice(bytes);
            tar.resize(tar.len().next_multiple_of(512), 0);
        }
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

#[tokio::test]
async fn files_of_a_workspace_need_no_session() {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let body =
        CreateWorkspace { name: Some("code".into()), size_mib: Some(16), max_files: Some(1024), ..Default::default() };
    client.workspace_create(&body).await.expect("a Workspace");
    put(&client, "code", "/a/b/c.txt", b"written").await.expect("a file with the directories above it");
    assert_eq!(get(&client, "code", "a/b/c.txt").await.expect("read"), b"written");
    let seen = client.workspace_file_stat("code", &at("/a/b/c.txt")).await.expect("stat");
    assert_eq!((seen.kind, seen.size_bytes, seen.uid, seen.mode.as_str()), (FileKind::File, 7, 1000, "0644"));
    let rename = RenameFile { from: "/a/b/c.txt".into(), to: "/a/d".into(), user: None };
    client.workspace_file_rename("code", &rename).await.expect("rename");
    let link = |path: &str, target: &str| MakeFile {
        path: path.into(),
        kind: FileKind::Symlink,
        target: Some(target.into()),
        mode: None,
        parents: false,
        user: None,
    };
    client.workspace_file_make("code", &link("/l", "a/d")).await.expect("a link");
    assert_eq!(get(&client, "code", "/l").await.expect("through a link"), b"written");
    put(&client, "code", "/l", b"anew").await.expect("what the link leads to is written");
    assert_eq!(get(&client, "code", "/a/d").await.expect("read"), b"anew");
    let list = client.workspace_file_list("code", &at("/")).await.expect("list");
    assert_eq!(list.entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a", "l"]);

    // Nothing of the host is there, by whatever name.
    for (name, target) in [("up", "../../../../etc/passwd"), ("top", "/etc/passwd"), ("own", "/proc/self/environ")] {
        client.workspace_file_make("code", &link(name, target)).await.expect("a link");
        assert_eq!(code(get(&client, "code", name).await), Some(ErrorCode::NotFound), "{name}");
    }
    for path in ["/etc/passwd", "../../etc/passwd", "/proc/self/fd/0", "/dev/null"] {
        assert_eq!(code(get(&client, "code", path).await), Some(ErrorCode::NotFound), "{path}");
    }
    let under = |path: &str| UnderPath { path: path.into(), recursive: Some(true), user: None };
    client.workspace_file_remove("code", &under("/a")).await.expect("remove");
    assert!(code(client.workspace_file_remove("code", &under("/")).await).is_some(), "the top was removed");

    // Full is an answer, and what is there stays.
    put(&client, "code", "/kept", b"kept").await.expect("a file");
    assert_eq!(code(put(&client, "code", "/big", &vec![7; 40 << 20]).await), Some(ErrorCode::DiskFull));
    assert_eq!(get(&client, "code", "/kept").await.expect("read"), b"kept");
    assert!(code(get(&client, "code", "/big").await).is_some(), "half a file is there");

    // Archives that lie: each is refused by name, and nothing lands anywhere else.
    let bad: [(&str, Vec<u8>); 8] = [
        ("a name that leads up", archive(&[(b'0', "../../escaped", b"x")])),
        ("a device", archive(&[(b'3', "null", b"")])),
        ("through a link", archive(&[(b'2', "out", b"/tmp"), (b'0', "out/escaped", b"x")])),
        ("a link to above", archive(&[(b'1', "hard", b"../../etc/passwd")])),
        ("cut off", archive(&[(b'0', "cut", &[1; 4096])])[..3000].to_vec()),
        ("without an end", archive(&[(b'0', "cut", b"x")])[..1024].to_vec()),
        ("no archive", vec![0x41; 4096]),
        ("a broken frame", [&[0x28, 0xB5, 0x2F, 0xFD][..], &[0xFF; 400]].concat()),
    ];
    for (what, bytes) in bad {
        let refused = client.workspace_import("code", body_from(bytes)).await;
        assert_eq!(code(refused), Some(ErrorCode::Invalid), "{what}");
        assert!(!std::path::Path::new("/tmp/escaped").exists(), "{what}");
    }
    // What is unpacked belongs to the guest's user; an import keeps whose it was and what it may.
    let plain = archive(&[(b'0', "tool", b"#!"), (b'2', "to", b"tool")]);
    client.workspace_tar_write("code", &at("/t"), body_from(plain.clone())).await.expect("tar");
    let seen = client.workspace_file_stat("code", &at("/t/tool")).await.expect("stat");
    assert_eq!((seen.uid, seen.mode.as_str()), (1000, "0755"));
    client.workspace_import("code", body_from(plain)).await.expect("import");
    let seen = client.workspace_file_stat("code", &at("/tool")).await.expect("stat");
    assert_eq!((seen.uid, seen.gid, seen.mode.as_str()), (1000, 1000, "6755"));

    // Out and in again, through the command line too.
    let exported = all(client.workspace_export("code").await.expect("export")).await.expect("whole");
    assert_eq!(exported[..4], [0x28, 0xB5, 0x2F, 0xFD]);
    let file = instance.home().join("code.tar.zst");
    fs::write(&file, &exported).expect("write");
    instance.pepo(["workspace", "import", "--create", "copy"]).args([&file]).ok();
    let shown = instance.pepo(["workspace", "files", "copy"]).ok().out();
    assert!(shown.contains("tool") && shown.contains("to -> tool") && shown.contains("6755"), "{shown}");
    assert_eq!(instance.pepo(["workspace", "cat", "copy", "/kept"]).ok().out(), "kept");
    let out = instance.home().join("out");
    instance.pepo(["workspace", "cp", "copy:/t"]).args([&out]).ok();
    assert_eq!(fs::read(out.join("tool")).expect("copied"), b"#!");
    instance.pepo(["workspace", "cp"]).args([out.as_os_str(), "copy:/back".as_ref()]).ok();
    assert_eq!(get(&client, "copy", "/back/tool").await.expect("copied"), b"#!");
    assert!(client.workspace_remove("copy", &RemoveWorkspace::default()).await.expect("remove").freed_bytes > 0);

    // Visits end with their answers.
    until("no visit is left", LIMIT, || instance.pids("pepo-share").is_empty().then_some(()));
    instance.pepo(["down"]).ok();
    assert_eq!(daemon.wait().code(), Some(0));
    instance.end();
}

#[tokio::test]
async fn an_apps_quota_is_named_when_a_workspace_is_made_and_when_it_grows() {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let quota = AppQuota { workspace_mib: Some(64), ..AppQuota::default() };
    let app = CreateApp { name: "shop".into(), quota, ..CreateApp::default() };
    client.app_create(&app).await.expect("an App");
    let shop = client.clone().of_app("shop");
    let sized = |size_mib| CreateWorkspace { size_mib: Some(size_mib), ..CreateWorkspace::default() };
    let first = shop.workspace_create(&sized(48)).await.expect("48 of 64").id.to_string();
    let over = |result: ClientError| {
        let ClientError::Api(error) = &result else { panic!("{result:?}") };
        let quota = error.quota.clone().expect("which quota");
        (result.code(), quota.name, quota.used, quota.limit)
    };
    let refused = shop.workspace_create(&sized(32)).await.expect_err("80 of 64");
    assert_eq!(over(refused), (Some(ErrorCode::TooManyRequests), "workspace_mib".into(), 48, 64));
    let grow = |size_mib| UpdateWorkspace { size_mib: Some(size_mib), ..UpdateWorkspace::default() };
    let refused = shop.workspace_update(&first, &grow(65)).await.expect_err("65 of 64");
    assert_eq!(over(refused), (Some(ErrorCode::TooManyRequests), "workspace_mib".into(), 48, 64));
    // A refusal has changed nothing; what fits is there at once.
    let usage = async || shop.workspace_show(&first).await.expect("show").usage.expect("usage");
    let before = usage().await;
    assert!((48 << 20..64 << 20).contains(&before.bytes), "{before:?}");
    assert_eq!(shop.workspace_update(&first, &grow(64)).await.expect("64 of 64").size_mib, 64);
    let after = usage().await;
    assert!(after.bytes >= 64 << 20 && after.files >= before.files, "{after:?}");
    assert_eq!(code(shop.workspace_update(&first, &grow(63)).await), Some(ErrorCode::Invalid));
    instance.pepo(["down"]).ok();
    assert_eq!(daemon.wait().code(), Some(0));
    instance.end();
}

#[tokio::test]
async fn a_backup_brings_workspaces_back_on_another_disk() {
    let instance = Instance::new();
    let daemon = instance.up();
    let client = instance.client();
    let body = CreateWorkspace { name: Some("code".into()), size_mib: Some(64), ..Default::default() };
    client.workspace_create(&body).await.expect("a Workspace");
    // More than one part, and nothing that could be guessed.
    let mut large = vec![0; 24 << 20];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").expect("urandom"), &mut large).expect("random");
    put(&client, "code", "/d/large", &large).await.expect("a file");
    put(&client, "code", "/small", b"small").await.expect("a file");
    client
        .workspace_create(&CreateWorkspace { name: Some("unused".into()), ..Default::default() })
        .await
        .expect("another");
    let bytes = all(client.backup().await.expect("backup")).await.expect("whole");
    put(&client, "code", "/later", b"later").await.expect("a file");
    instance.pepo(["down"]).ok();
    assert_eq!(daemon.wait().code(), Some(0));

    // The disk is lost; what the backup has is put on a new one.
    fs::remove_dir_all(instance.home().join("state/volumes")).expect("the disk is lost");
    let restored = instance.program("pepod").args(["restore", "--replace", "--json"]).stdin(bytes).ok().out();
    let report: RestoreReport = serde_json::from_str(&restored).expect("a report");
    assert!(report.manifest.files.keys().filter(|name| name.starts_with("workspaces/")).count() >= 2, "{report:?}");
    let daemon = instance.up();
    let client = instance.client();
    assert_eq!(get(&client, "code", "/small").await.expect("read"), b"small");
    assert!(get(&client, "code", "/d/large").await.expect("read") == large, "other bytes came back");
    assert_eq!(code(get(&client, "code", "/later").await), Some(ErrorCode::NotFound));
    let waiting = instance.home().join("state/store/workspaces");
    until("nothing waits any more", LIMIT, || {
        let left = fs::read_dir(&waiting).map(Iterator::count).unwrap_or(0);
        (left == 0).then_some(())
    });
    instance.pepo(["down"]).ok();
    assert_eq!(daemon.wait().code(), Some(0));
    instance.end();
}
