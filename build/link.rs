//! What the linker is told, and what it is given.
//!
//! Used by the build script and by its tests: nothing here reads the environment, prints, or panics.

use crate::search::{DRIVER, Library, Machine};
use std::fs;
use std::path::{Path, PathBuf};

/// The libraries that the crate `cuda-sys` has every program linked with, by their files' names.
const OF_CUDA_SYS: [&[&str]; 3] = [&DRIVER, &["libcudart.so"], &["libcublas.so"]];

/// An archive without members, which any linker takes and finds nothing in.
const EMPTY_ARCHIVE: &[u8] = b"!<arch>\n";

/// What a program with `cuda-sys` in it is linked with.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Supplied {
    /// Folders for the linker to search.
    pub(crate) folders: Vec<PathBuf>,
    /// Every file that was read.
    pub(crate) read: Vec<PathBuf>,
}

/// The folder in which the linker finds a library: its own, or for one that has only the loader's name, as containers have
/// it, a folder in `out` with a link.
///
/// # Errors
/// The link cannot be made: which, and why.
pub(crate) fn folder(library: &Library, out: &Path) -> Result<PathBuf, String> {
    match library.path.parent() {
        Some(folder) if library.has_linkers_name() => Ok(folder.to_owned()),
        _ => {
            let folder = out.join("cuda");
            let link = folder.join(DRIVER[0]);
            let refused = |error: std::io::Error| format!("{}: {error}", link.display());
            fs::create_dir_all(&folder).map_err(refused)?;
            if link.symlink_metadata().is_ok() {
                fs::remove_file(&link).map_err(refused)?;
            }
            make_link(&library.path, &link).map_err(refused)?;
            Ok(folder)
        }
    }
}

#[cfg(unix)]
fn make_link(to: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(to, at)
}

#[cfg(not(unix))]
fn make_link(to: &Path, at: &Path) -> std::io::Result<()> {
    fs::copy(to, at).map(drop)
}

/// Has the linker find what `cuda-sys` asks it for: the library where there is one, and else an empty archive in `out`.
///
/// # Errors
/// An archive or a link cannot be made: which, and why.
pub(crate) fn for_cuda_sys(machine: &Machine, out: &Path) -> Result<Supplied, String> {
    let empty = out.join("cuda-sys");
    // An archive of an earlier build would hide a library that has come since.
    if empty.exists() {
        fs::remove_dir_all(&empty).map_err(|error| format!("{}: {error}", empty.display()))?;
    }
    let mut supplied = Supplied::default();
    for names in OF_CUDA_SYS {
        let outcome = machine.search(names);
        supplied.read.extend(outcome.read);
        let folder = match outcome.library {
            Some(library) => folder(&library, out)?,
            None => {
                let archive = empty.join(names[0]).with_extension("a");
                let refused = |error: std::io::Error| format!("{}: {error}", archive.display());
                fs::create_dir_all(&empty).map_err(refused)?;
                fs::write(&archive, EMPTY_ARCHIVE).map_err(refused)?;
                empty.clone()
            }
        };
        if !supplied.folders.contains(&folder) {
            supplied.folders.push(folder);
        }
    }
    Ok(supplied)
}
