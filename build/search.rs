//! Where the CUDA driver's library, and the toolkit's, may lie, and whether what lies there is one.
//!
//! Used by the build script and by its tests: nothing here reads the environment, prints, or panics.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Names of the driver's library, the linker's own first.
pub(crate) const DRIVER: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// What the search knows of the machine and of what the user asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    /// Folders to look into first: `VRAMPOOL_CUDA_LIB_DIR`'s.
    pub(crate) chosen: Vec<PathBuf>,
    /// The toolkit's folders, of `CUDA_HOME`, `CUDA_PATH` and `CUDA_ROOT`.
    pub(crate) toolkits: Vec<PathBuf>,
    /// The target's architecture, as `CARGO_CFG_TARGET_ARCH` has it.
    pub(crate) architecture: String,
    /// The root of the file system: `/`, but in tests.
    pub(crate) root: PathBuf,
}

/// A library that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Library {
    /// The file.
    pub(crate) path: PathBuf,
    /// Whether it is the toolkit's stub: enough for the linker, and no driver.
    pub(crate) is_stub: bool,
}

impl Library {
    /// Whether the linker finds it in its folder by `-l`.
    pub(crate) fn has_linkers_name(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "so")
    }
}

/// What came of a search.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Outcome {
    /// The library, or where there is none, a stub.
    pub(crate) library: Option<Library>,
    /// Every folder that was looked into, in order.
    pub(crate) searched: Vec<PathBuf>,
    /// Every file that was read.
    pub(crate) read: Vec<PathBuf>,
}

impl Machine {
    /// Looks for a library that has one of the names, best first. A real one wins over a stub wherever it lies.
    pub(crate) fn search(&self, names: &[&str]) -> Outcome {
        let mut outcome = Outcome::default();
        let mut stub = None;
        for folder in self.folders() {
            if outcome.searched.contains(&folder) {
                continue;
            }
            outcome.searched.push(folder.clone());
            for path in names.iter().map(|name| folder.join(name)) {
                let Ok(file) = File::open(&path) else { continue };
                outcome.read.push(path.clone());
                if !self.is_library(file) {
                    continue;
                }
                let library = Library { is_stub: is_stub(&path), path };
                if !library.is_stub {
                    outcome.library = Some(library);
                    return outcome;
                }
                stub = stub.or(Some(library));
            }
        }
        outcome.library = stub;
        outcome
    }

    /// The folders, best first.
    fn folders(&self) -> Vec<PathBuf> {
        let triple = format!("{}-linux-gnu", self.architecture);
        // Toolkits keep a folder for each platform that they build for; this is NVIDIA's name for it.
        let platform = match self.architecture.as_str() {
            "aarch64" => "sbsa-linux".to_owned(),
            other => format!("{other}-linux"),
        };
        let mut folders = self.chosen.clone();
        let system = [
            format!("usr/lib/{triple}"),
            // Jetson.
            format!("usr/lib/{triple}/nvidia"),
            format!("usr/lib/{triple}/tegra"),
            format!("lib/{triple}"),
            "usr/lib64".to_owned(),
            "usr/lib64/nvidia".to_owned(),
            "usr/lib".to_owned(),
            "usr/local/lib".to_owned(),
            // Windows Subsystem for Linux.
            "usr/lib/wsl/lib".to_owned(),
            // Containers.
            "usr/local/nvidia/lib64".to_owned(),
            "usr/local/nvidia/lib".to_owned(),
            // NixOS.
            "run/opengl-driver/lib".to_owned(),
        ];
        folders.extend(system.map(|folder| self.root.join(folder)));
        for toolkit in self.toolkits.iter().cloned().chain([self.root.join("usr/local/cuda")]) {
            let targets = toolkit.join("targets").join(&platform).join("lib");
            for folder in [toolkit.join("lib64"), toolkit.join("lib"), targets] {
                // `compat` has newer drivers than the system's, for the loader's path only; it is not looked into.
                folders.extend([folder.clone(), folder.join("stubs")]);
            }
        }
        folders
    }

    /// Whether a file is an ELF library of the target's architecture. A linker's script, or another architecture's
    /// library, as lies about where one builds for another machine, is none.
    fn is_library(&self, mut file: File) -> bool {
        let mut header = [0; 20];
        if file.read_exact(&mut header).is_err() {
            return false;
        }
        let machine: u16 = match self.architecture.as_str() {
            "x86_64" => 62,
            "aarch64" => 183,
            _ => return false,
        };
        // e_ident: magic, 64 bits, little-endian; e_type: shared object; e_machine.
        header[..6] == *b"\x7fELF\x02\x01" && header[16..18] == 3u16.to_le_bytes() && header[18..20] == machine.to_le_bytes()
    }
}

/// Whether a file is the toolkit's stub: they lie in folders of that name, or are links into one.
fn is_stub(path: &Path) -> bool {
    let in_stubs = |path: &Path| path.components().any(|component| component == Component::Normal("stubs".as_ref()));
    in_stubs(path) || path.canonicalize().is_ok_and(|real| in_stubs(&real))
}
