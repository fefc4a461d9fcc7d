//! NFSv4 over a guest's tap, for comparison: server and client out of one Image, so that this machine needs neither, and
//! the kernel's modules are those of the kernel that boots.
//!
//! As near to a Workspace as it can be: the server is a process of this host too, and what it exports is a copy of the empty
//! file system that the Workspace began as, mounted as that one is. Both mounts, their loop devices and the server go together.
//!
//! The server keeps NFS's promise and no more: what a client commits is on the disk before it is told so, and a client
//! commits what it wrote to a file when that is closed.

use std::fs;
use std::time::Duration;

use pepo_e2e::world::{SERVER, World};
use pepo_e2e::{Instance, Options, Program, Started, until};
use rustix::process::Signal;

use crate::room::Room;

/// Where the guest has it.
pub const PLACE: &str = "/mnt/nfs";

const IMAGE: &str = "nfs";

/// What `base` lacks: the guest's side, the modules of the guest's kernel, the server.
const PACKAGES: [&str; 5] = ["nfs-common", "kmod", "linux-image-cloud-amd64", "nfs-ganesha", "nfs-ganesha-vfs"];

const PORT: u16 = 2049;

/// NFSv4 over TCP alone, so nothing beside it has to be found by a port mapper. Nobody has anything to reclaim from a server
/// that never ran before. What it asks of the kernel for servers of its own host's disks takes a right that root may lack.
const CONFIG: &str = "
NFS_CORE_PARAM { Protocols = 4; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; Allow_Set_Io_Flusher_Fail = true; }
NFSv4 { Graceless = true; Only_Numeric_Owners = true; }
EXPORT { Export_Id = 1; Path = /srv; Pseudo = /srv; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; FSAL { Name = VFS; } }
";

/// In a mount namespace of its own: the root file system of the Image, an empty file system, a directory, the configuration.
/// A device is let go as soon as it is mounted, or is not: from then on it goes with its mount, and to let go twice fails.
const SERVE: &str = r#"
image=$1 empty=$2 here=$3 config=$4
root=$here/root
mkdir "$here" "$root"
cp --sparse=always "$empty" "$here/export.ext4"
mount -t erofs -o ro,loop "$image" "$root"
for own in run tmp var/lib/nfs; do mount -t tmpfs tmpfs "$root/$own"; done
mkdir "$root/run/ganesha" "$root/var/lib/nfs/ganesha"
for shared in dev proc; do mount --rbind "/$shared" "$root/$shared"; done
device=$(losetup --find --show --direct-io=on "$here/export.ext4")
mount -t ext4 -o nosuid,nodev,noexec,noinit_itable,discard,errors=remount-ro "$device" "$root/srv" || losetup --detach "$device"
losetup --detach "$device"
chown 1000:1000 "$root/srv"
printf %s "$config" > "$root/run/ganesha.conf"
exec chroot "$root" ganesha.nfsd -F -L STDOUT -N EVENT -f /run/ganesha.conf -p /run/ganesha.pid
"#;

/// One Session in that world, with a Workspace of its own, whose guest can be a client.
pub fn room(world: &World) -> Room {
    // No limit of a policy's shall be what is measured.
    let config = Some("[network]\nflows = 100000\npackets = 10000000\n".to_owned());
    let within = Some(world.host_namespace());
    let instance = Instance::with(Options { without_images: true, config, network: true, within });
    instance.build_image(IMAGE, &PACKAGES);
    Room::of(instance, &["--image", IMAGE, "--net", "public", "--workspace", "own"])
}

/// A server in the internet of a world, and its export in a room's guest.
pub struct Nfs {
    server: Started,
}

impl Nfs {
    /// Starts the one and mounts the other.
    pub fn mounted(world: &World, room: &Room) -> Self {
        let home = room.instance.home();
        let templates = fs::read_dir(home.join("state/volumes/templates")).expect("empty file systems");
        let [empty] = &templates.map(|entry| entry.expect("entry").path()).collect::<Vec<_>>()[..] else {
            panic!("of one Workspace there is one empty file system");
        };
        // It is the instance's, by its environment: whatever fails, it goes with that.
        let server = Program::new("/usr/bin/unshare")
            .args(["--mount", "--", "sh", "-ec", SERVE, "serve"])
            .args([room.guest.image.as_path(), empty, &home.join("nfs")])
            .args([CONFIG])
            .env("PEPO_HOME", home)
            .within(Duration::from_secs(3600));
        let mut server = world.in_internet(|| server.start());
        until("the NFS server answers", Duration::from_secs(60), || {
            assert!(server.runs(), "the NFS server ended: {}{}", server.so_far(), server.complaint());
            world.host_reaches(SERVER, PORT).then_some(())
        });
        let mount = format!("sudo mkdir {PLACE} && sudo mount -t nfs4 -o vers=4.2,hard {SERVER}:/srv {PLACE}");
        room.instance.pepo(["exec", &room.session, "--", "sh", "-c", &mount]).ok();
        Nfs { server }
    }

    /// Unmounts the one and ends the other.
    pub fn end(self, room: &Room) {
        room.instance.pepo(["exec", &room.session, "--", "sudo", "umount", PLACE]).ok();
        self.server.signal(Signal::KILL);
        self.server.wait();
    }
}
