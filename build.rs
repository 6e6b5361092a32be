//! Decides how the CUDA driver's library is bound: linked, or found when the program runs.
//!
//! Neither the CUDA toolkit nor a driver is needed to build. The switches are told of in `src/driver/cuda/mod.rs`.

#[path = "build/search.rs"]
mod search;

use search::{Library, Machine, Outcome};
use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const MODE: &str = "VRAMPOOL_CUDA";
const FOLDER: &str = "VRAMPOOL_CUDA_LIB_DIR";
const TOOLKITS: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/search.rs");
    println!("cargo::rustc-check-cfg=cfg(vrampool_cuda, values(\"linked\", \"runtime\", \"off\"))");
    match binding() {
        Ok(binding) => {
            println!("cargo::rustc-cfg=vrampool_cuda=\"{binding}\"");
            ExitCode::SUCCESS
        }
        Err(message) => {
            // One line each: Cargo reads them so.
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

/// A variable's value, unless it is empty. The script runs anew when it changes.
fn variable(name: &str) -> Option<PathBuf> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn binding() -> Result<&'static str, String> {
    let is_linux = env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux");
    let is_docs_rs = variable("DOCS_RS").is_some();
    let mode = variable(MODE);
    let mode = mode.as_deref().map_or("auto".into(), Path::to_string_lossy);
    match &*mode {
        "off" => Ok("off"),
        "dlopen" => Ok("runtime"),
        // The build of the documentation links nothing, and the driver is bound on Linux only.
        "auto" | "link" if is_docs_rs => Ok("runtime"),
        "auto" if !is_linux => Ok("off"),
        "link" if !is_linux => Err(format!("{MODE}=link: the CUDA driver is bound on Linux only")),
        "auto" => {
            let outcome = searched();
            match &outcome.library {
                Some(library) if !library.is_stub => link(library).map(|()| "linked"),
                _ => Ok("runtime"),
            }
        }
        "link" => {
            let outcome = searched();
            match &outcome.library {
                Some(library) => link(library).map(|()| "linked"),
                None => Err(nothing_found(&outcome)),
            }
        }
        other => Err(format!("{MODE}={other} is none of auto, link, dlopen, off")),
    }
}

fn searched() -> Outcome {
    let machine = Machine {
        chosen: variable(FOLDER),
        toolkits: TOOLKITS.into_iter().filter_map(variable).collect(),
        architecture: env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default(),
        root: "/".into(),
    };
    let outcome = machine.search();
    for path in &outcome.read {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    outcome
}

/// Has the program linked with a library.
fn link(library: &Library) -> Result<(), String> {
    let folder = match library.path.parent() {
        Some(folder) if library.has_linkers_name() => folder.to_owned(),
        _ => link_for_linker(library)?,
    };
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=dylib=cuda");
    Ok(())
}

/// A folder in which the linker finds a library that has only the loader's name, as containers have it.
fn link_for_linker(library: &Library) -> Result<PathBuf, String> {
    let folder = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: Cargo sets it for build scripts")?).join("cuda");
    let link = folder.join("libcuda.so");
    let refused = |error: std::io::Error| format!("{}: {error}", link.display());
    std::fs::create_dir_all(&folder).map_err(refused)?;
    if link.symlink_metadata().is_ok() {
        std::fs::remove_file(&link).map_err(refused)?;
    }
    make_link(&library.path, &link).map_err(refused)?;
    Ok(folder)
}

#[cfg(unix)]
fn make_link(to: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(to, at)
}

#[cfg(not(unix))]
fn make_link(to: &Path, at: &Path) -> std::io::Result<()> {
    std::fs::copy(to, at).map(drop)
}

fn nothing_found(outcome: &Outcome) -> String {
    let mut message = format!("{MODE}=link: no libcuda.so or libcuda.so.1 for the target was found. Searched:\n");
    for folder in &outcome.searched {
        message += &format!("  {}\n", folder.display());
    }
    message += &format!("Set {FOLDER} to the library's folder, or CUDA_HOME to the toolkit's,\n");
    message += &format!("or build with {MODE}=dlopen to have the library found when the program runs.");
    message
}
