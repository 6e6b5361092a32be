//! Decides how the CUDA driver's library is bound: linked, or found when the program runs.
//!
//! Neither the CUDA toolkit nor a driver is needed to build. The switches are told of in `src/driver/cuda/mod.rs`.

#[path = "build/link.rs"]
mod link;
#[path = "build/search.rs"]
mod search;

use search::{DRIVER, Library, Machine, Outcome};
use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const MODE: &str = "VRAMPOOL_CUDA";
const FOLDER: &str = "VRAMPOOL_CUDA_LIB_DIR";
const TOOLKITS: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
/// Lists of folders: the one that the build script of `cuda-sys` hands to the linker, and the linker's own.
const LIBRARY_PATHS: [&str; 2] = ["CUDA_LIBRARY_PATH", "LIBRARY_PATH"];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/link.rs");
    println!("cargo::rerun-if-changed=build/search.rs");
    println!("cargo::rustc-check-cfg=cfg(vrampool_cuda, values(\"linked\", \"runtime\", \"off\"))");
    match binding().and_then(|binding| for_cuda_sys().map(|()| binding)) {
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

fn is_linux() -> bool {
    env::var_os("CARGO_CFG_TARGET_OS").is_some_and(|system| system == "linux")
}

/// Whether the documentation alone is built, for which nothing is linked.
fn is_docs_rs() -> bool {
    variable("DOCS_RS").is_some()
}

fn out() -> Result<PathBuf, String> {
    env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| "OUT_DIR is not set: Cargo sets it for build scripts".to_owned())
}

fn binding() -> Result<&'static str, String> {
    let mode = variable(MODE);
    let mode = mode.as_deref().map_or("auto".into(), Path::to_string_lossy);
    match &*mode {
        "off" => Ok("off"),
        "dlopen" => Ok("runtime"),
        // The driver is bound on Linux only.
        "auto" | "link" if is_docs_rs() => Ok("runtime"),
        "auto" if !is_linux() => Ok("off"),
        "link" if !is_linux() => Err(format!("{MODE}=link: the CUDA driver is bound on Linux only")),
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

fn machine() -> Machine {
    Machine {
        chosen: variable(FOLDER).into_iter().collect(),
        toolkits: TOOLKITS.into_iter().filter_map(variable).collect(),
        architecture: env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default(),
        root: "/".into(),
    }
}

fn searched() -> Outcome {
    let outcome = machine().search(&DRIVER);
    depend_on(&outcome.read);
    outcome
}

/// The script runs anew when a file changes.
fn depend_on(files: &[PathBuf]) {
    for path in files {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

/// Has the program linked with a library.
fn link(library: &Library) -> Result<(), String> {
    let folder = link::folder(library, &out()?)?;
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=dylib=cuda");
    Ok(())
}

/// With the feature `cuda-sys`: has the linker find what that crate asks it for, on machines without CUDA too.
fn for_cuda_sys() -> Result<(), String> {
    if env::var_os("CARGO_FEATURE_CUDA_SYS").is_none() || !is_linux() || is_docs_rs() {
        return Ok(());
    }
    let mut machine = machine();
    // Where the linker finds a library, an empty archive must not come before it.
    for list in LIBRARY_PATHS.into_iter().filter_map(variable) {
        machine.chosen.extend(env::split_paths(&list).filter(|folder| !folder.as_os_str().is_empty()));
    }
    let supplied = link::for_cuda_sys(&machine, &out()?)?;
    depend_on(&supplied.read);
    for folder in supplied.folders {
        println!("cargo::rustc-link-search=native={}", folder.display());
    }
    Ok(())
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
