//! How much memory there is: for the machine, and for the control group that this process is in.

use std::path::Path;

/// All memory that this process can ever have, in bytes; `None` where the system does not say.
pub fn total() -> Option<u64> {
    total_in(Path::new("/"))
}

/// Bytes that can be had without swapping; 1 GiB where the system does not say.
pub fn available() -> u64 {
    let root = Path::new("/");
    let machine = meminfo(root, "MemAvailable:").unwrap_or(1 << 30);
    limit(root).map_or(machine, |limit| limit.min(machine))
}

fn total_in(root: &Path) -> Option<u64> {
    let machine = meminfo(root, "MemTotal:");
    [machine, limit(root)].into_iter().flatten().min()
}

fn read(root: &Path, path: &str) -> Option<String> {
    std::fs::read_to_string(root.join(path.trim_start_matches('/'))).ok()
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo(root: &Path, name: &str) -> Option<u64> {
    let text = read(root, "proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number = line.trim().strip_suffix(" kB")?.trim();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// The lowest limit of the control groups that this process is in, of either version.
fn limit(root: &Path) -> Option<u64> {
    let groups = read(root, "proc/self/cgroup")?;
    let lowest = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let memory = controllers.split(',').any(|name| name == "memory");
        match (controllers.is_empty(), memory) {
            (true, _) => lowest_of(root, "sys/fs/cgroup", group, "memory.max"),
            (_, true) => lowest_of(root, "sys/fs/cgroup/memory", group, "memory.limit_in_bytes"),
            _ => None,
        }
    });
    lowest.min()
}

/// The lowest limit of a group and those above it. In a container the group may be named as seen
/// from outside: then only the top is there.
fn lowest_of(root: &Path, mount: &str, group: &str, file: &str) -> Option<u64> {
    let above = Path::new(group.trim_start_matches('/')).ancestors();
    above
        .filter_map(|group| {
            let path = Path::new(mount).join(group).join(file);
            // `max`, or no such file: no limit.
            read(root, path.to_str()?)?.trim().parse::<u64>().ok()
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       1000 kB\nMemFree:   1 kB\nMemAvailable:    600 kB\n",
    );

    fn total_of(files: &[(&str, &str)]) -> Option<u64> {
        total_in(machine(files).path())
    }

    #[test]
    fn the_machine_or_the_group_whichever_is_lower() {
        assert_eq!(total_of(&[]), None);
        assert_eq!(total_of(&[MEMINFO]), Some(1000 << 10));
        let unified = ("proc/self/cgroup", "0::/a/b\n");
        let max = ("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(total_of(&[MEMINFO, unified, max]), Some(1000 << 10));
        let above = ("sys/fs/cgroup/a/memory.max", "4096\n");
        assert_eq!(total_of(&[MEMINFO, unified, max, above]), Some(4096));
        let high = ("sys/fs/cgroup/a/memory.max", "409600000\n");
        assert_eq!(total_of(&[MEMINFO, unified, high]), Some(1000 << 10));
        // Seen from a container.
        let top = ("sys/fs/cgroup/memory.max", "8192\n");
        assert_eq!(total_of(&[MEMINFO, unified, top]), Some(8192));
    }

    #[test]
    fn older_control_groups_count() {
        let groups = ("proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/pod/c\n");
        let own = (
            "sys/fs/cgroup/memory/pod/c/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        assert_eq!(total_of(&[MEMINFO, groups, own]), Some(1000 << 10));
        let pod = ("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "12288\n");
        assert_eq!(total_of(&[MEMINFO, groups, own, pod]), Some(12288));
        let cpu = ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1\n");
        assert_eq!(total_of(&[MEMINFO, groups, own, cpu]), Some(1000 << 10));
    }
}
