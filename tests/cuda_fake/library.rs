//! The fake driver's library: built once, copied under the driver's name, and copies of it that lack functions.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

/// The name that the system's loader knows the driver by.
pub(crate) const NAME: &str = "libcuda.so.1";

/// The library with every function. A child finds it where its parent put it.
pub(crate) fn full() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| match env::var_os("VRAMPOOL_LIBCUDA") {
        Some(path) if super::support::is_child() => path.into(),
        _ => build(&[], "fake-cuda"),
    })
}

/// The library of a driver no newer than CUDA 10.1.
pub(crate) fn reduced() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        full();
        build(&["--features", "reduced"], "fake-cuda-reduced")
    })
}

/// Builds the library, and puts it into a folder of its own.
fn build(features: &[&str], folder: &str) -> PathBuf {
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = temporary.join("fake-libcuda");
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-libcuda/Cargo.toml");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--manifest-path"]).arg(manifest).arg("--target-dir").arg(&target).args(features);
    // What the crate's own build is told is not for this one, which may not itself be bound to a driver.
    cargo.env("VRAMPOOL_CUDA", "off");
    for variable in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "RUSTC_WORKSPACE_WRAPPER"] {
        cargo.env_remove(variable);
    }
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    place(&fs::read(target.join("debug/libcuda.so")).expect("the library that was built"), folder)
}

/// Writes a library under the driver's name, whole or not at all.
fn place(bytes: &[u8], folder: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    fs::create_dir_all(&folder).expect("a folder for the library");
    let unfinished = folder.join(format!("{NAME}.{}", std::process::id()));
    fs::write(&unfinished, bytes).expect("room for the library");
    let path = folder.join(NAME);
    fs::rename(unfinished, &path).expect("the folder is writable");
    path
}

/// A copy of the library without some functions: they have other names there. The loader, which compares names, does not
/// find them.
pub(crate) fn without(functions: &[impl AsRef<str>], folder: &str) -> PathBuf {
    let mut bytes = fs::read(full()).expect("the library");
    for function in functions {
        let name = [b"\0", function.as_ref().as_bytes(), b"\0"].concat();
        let starts: Vec<usize> = bytes.windows(name.len()).enumerate().filter(|(_, found)| *found == name).map(|(at, _)| at).collect();
        assert!(!starts.is_empty(), "the library has no {}", function.as_ref());
        for start in starts {
            bytes[start + 1] = b'_';
        }
    }
    place(&bytes, folder)
}
