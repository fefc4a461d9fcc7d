//! The section `[pool]`: which Sandboxes wait ready, and how many of each.
//!
//! ```toml
//! [pool]
//! target = 2                                          # of the usual Image, in the usual size; 0 is no pool
//! shapes = "browser:memory=2g:target=1, base-dev"     # others beside it; what is not said is as usual
//! ```

use std::time::Duration;

use super::{SandboxConfig, fits, number, size_mib};

/// Sandboxes of one shape at most: each is a whole microVM that nobody uses.
const MOST: usize = 1024;

/// Shapes at most.
const SHAPES: usize = 16;

/// Sandboxes that wait ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Of each shape how many. One with a target of zero is not here.
    pub shapes: Vec<PoolShape>,
    /// After how long one that nobody claimed is replaced.
    pub age: Duration,
}

/// One shape that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Its Image, by name: whatever that names when the Sandbox is made.
    pub image: String,
    /// Processors.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Scratch disk, MiB.
    pub disk_mib: u32,
    /// How many there are while the host is quiet.
    pub target: usize,
    /// Below how many one is made although commands run.
    pub minimum: usize,
}

impl PoolConfig {
    /// No pool.
    pub fn off() -> Self {
        PoolConfig { shapes: Vec::new(), age: Duration::MAX }
    }
}

/// Reads `pool.target` and `pool.minimum`.
pub(super) fn count(text: &str) -> Result<usize, String> {
    number(text, 0, MOST)
}

/// The usual shape, then those of `pool.shapes`.
pub(super) fn shapes(
    text: &str,
    sandbox: &SandboxConfig,
    target: usize,
    minimum: usize,
) -> Result<Vec<PoolShape>, String> {
    let usual = PoolShape {
        image: sandbox.image.clone(),
        cpus: sandbox.cpus,
        memory_mib: sandbox.memory_mib,
        disk_mib: sandbox.disk_mib,
        target,
        minimum: minimum.min(target),
    };
    let mut shapes = vec![usual.clone()];
    for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
        let mut parts = one.split(':').map(str::trim);
        let image = parts.next().unwrap_or_default().to_owned();
        if image.is_empty() {
            return Err(format!("`{one}` names no Image"));
        }
        let mut shape = PoolShape { image, target: 1, minimum: 0, ..usual.clone() };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not key=value"))?;
            let told = |reason: String| format!("{key}: {reason}");
            match key {
                "cpus" => shape.cpus = number(value, 1, 64).map_err(told)?,
                "memory" => {
                    shape.memory_mib = size_mib(value).and_then(|mib| fits(mib, 128)).map_err(told)?;
                }
                "disk" => shape.disk_mib = size_mib(value).and_then(|mib| fits(mib, 16)).map_err(told)?,
                "target" => shape.target = count(value).map_err(told)?,
                "minimum" => shape.minimum = count(value).map_err(told)?,
                _ => return Err(format!("`{key}` is none of cpus, memory, disk, target, minimum")),
            }
        }
        if shape.minimum > shape.target {
            return Err(format!("minimum {} of `{}` is above its target {}", shape.minimum, shape.image, shape.target));
        }
        let is_same = |other: &PoolShape| {
            (&other.image, other.cpus, other.memory_mib, other.disk_mib)
                == (&shape.image, shape.cpus, shape.memory_mib, shape.disk_mib)
        };
        if shapes.iter().any(is_same) {
            return Err(format!("`{one}` is there twice; the usual shape is set by target and minimum"));
        }
        shapes.push(shape);
    }
    if shapes.len() > SHAPES {
        return Err(format!("{} shapes; at most {SHAPES}", shapes.len()));
    }
    shapes.retain(|shape| shape.target > 0);
    Ok(shapes)
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Typed};
    use super::*;

    fn read(flags: &[(&str, &str)]) -> Result<PoolConfig, String> {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let typed = Typed { flags, ..Typed::default() };
        Config::read(&typed).map(|config| config.pool).map_err(|error| error.to_string())
    }

    #[test]
    fn shapes_take_from_the_usual_what_they_do_not_say() {
        let pool = read(&[
            ("sandbox.memory", "1g"),
            ("pool.target", "3"),
            ("pool.minimum", "9"),
            ("pool.shapes", "browser:memory=2g:target=2:minimum=1, base:cpus=2,"),
        ])
        .expect("pool");
        let shape = |image: &str, cpus, memory_mib, target, minimum| PoolShape {
            image: image.into(),
            cpus,
            memory_mib,
            disk_mib: 2048,
            target,
            minimum,
        };
        let wanted = [shape("base", 1, 1024, 3, 3), shape("browser", 1, 2048, 2, 1), shape("base", 2, 1024, 1, 0)];
        assert_eq!(pool.shapes, wanted);
    }

    #[test]
    fn zero_is_off_and_what_is_wrong_is_named() {
        assert!(read(&[("pool.target", "0")]).expect("pool").shapes.is_empty());
        let one = read(&[("pool.target", "0"), ("pool.shapes", "base")]).expect_err("twice");
        assert!(one.contains("twice") && one.contains("pool.shapes"), "{one}");
        for (shapes, says) in [
            ("x:cpus", "`cpus` is not key=value"),
            ("x:cpu=1", "none of cpus"),
            (":cpus=1", "names no Image"),
            ("x:memory=1", "at least 128"),
            ("x:minimum=2", "above its target 1"),
        ] {
            let error = read(&[("pool.shapes", shapes)]).expect_err(shapes);
            assert!(error.contains(says), "{shapes}: {error}");
        }
    }
}
