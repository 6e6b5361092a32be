//! The build script's search for the CUDA driver's library, and what it has the linker find, over made-up machines.

#[path = "../build/link.rs"]
mod link;
#[path = "../build/search.rs"]
mod search;

use search::{DRIVER, Library, Machine, Outcome};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const X86: u16 = 62;
const ARM: u16 = 183;

/// A file system of its own, gone at the end.
struct Root(PathBuf);

impl Root {
    fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("build_search").join(format!("{name}-{}", std::process::id()));
        _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    fn file(&self, path: &str, bytes: &[u8]) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn library(&self, path: &str) {
        self.file(path, &elf(X86));
    }

    fn machine(&self) -> Machine {
        Machine { architecture: "x86_64".to_owned(), root: self.0.clone(), ..Machine::default() }
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// The begin of a 64-bit shared object.
fn elf(machine: u16) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend(3u16.to_le_bytes());
    bytes.extend(machine.to_le_bytes());
    bytes.resize(64, 0);
    bytes
}

fn found(outcome: &Outcome) -> Option<(&Path, bool)> {
    outcome.library.as_ref().map(|library| (library.path.as_path(), library.is_stub))
}

#[test]
fn an_empty_machine_has_none_and_says_where_it_looked() {
    let root = Root::new("empty");
    let outcome = root.machine().search(&DRIVER);
    assert_eq!((found(&outcome), outcome.read.len()), (None, 0));
    for folder in ["usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/wsl/lib", "usr/local/nvidia/lib64", "usr/local/cuda/lib64/stubs"] {
        assert!(outcome.searched.contains(&root.at(folder)), "{folder}");
    }
}

#[test]
fn every_usual_place_is_known() {
    for folder in [
        "usr/lib/x86_64-linux-gnu",
        "lib/x86_64-linux-gnu",
        "usr/lib64",
        "usr/lib64/nvidia",
        "usr/lib",
        "usr/lib/wsl/lib",
        "usr/local/nvidia/lib64",
        "usr/local/nvidia/lib",
        "usr/local/cuda/lib64",
    ] {
        for name in ["libcuda.so", "libcuda.so.1"] {
            let root = Root::new("usual");
            let path = format!("{folder}/{name}");
            root.library(&path);
            let outcome = root.machine().search(&DRIVER);
            assert_eq!(found(&outcome), Some((root.at(&path).as_path(), false)));
            assert_eq!(outcome.library.unwrap().has_linkers_name(), name == "libcuda.so");
            assert_eq!(outcome.read, [root.at(&path)]);
        }
    }
}

#[test]
fn the_chosen_folder_comes_first_and_the_linkers_name_before_the_loaders() {
    let root = Root::new("chosen");
    root.library("usr/lib64/libcuda.so");
    root.library("mine/libcuda.so.1");
    let machine = Machine { chosen: vec![root.at("mine")], ..root.machine() };
    assert_eq!(found(&machine.search(&DRIVER)), Some((root.at("mine/libcuda.so.1").as_path(), false)));
    root.library("mine/libcuda.so");
    assert_eq!(found(&machine.search(&DRIVER)), Some((root.at("mine/libcuda.so").as_path(), false)));
}

#[test]
fn a_stub_is_told_from_a_driver_and_comes_last() {
    let root = Root::new("stub");
    root.library("toolkit/lib64/stubs/libcuda.so");
    let machine = Machine { toolkits: vec![root.at("toolkit")], ..root.machine() };
    assert_eq!(found(&machine.search(&DRIVER)), Some((root.at("toolkit/lib64/stubs/libcuda.so").as_path(), true)));
    // As people make it to have programs start.
    symlink("libcuda.so", root.at("toolkit/lib64/stubs/libcuda.so.1")).unwrap();
    assert!(machine.search(&DRIVER).library.unwrap().is_stub);
    fs::create_dir_all(root.at("usr/lib64")).unwrap();
    symlink(root.at("toolkit/lib64/stubs/libcuda.so"), root.at("usr/lib64/libcuda.so.1")).unwrap();
    assert_eq!(found(&machine.search(&DRIVER)), Some((root.at("usr/lib64/libcuda.so.1").as_path(), true)), "a link to a stub is one");
    root.library("usr/local/nvidia/lib/libcuda.so.1");
    assert_eq!(found(&machine.search(&DRIVER)), Some((root.at("usr/local/nvidia/lib/libcuda.so.1").as_path(), false)));
    let chosen = Machine { chosen: vec![root.at("toolkit/lib64/stubs")], ..machine };
    assert!(!chosen.search(&DRIVER).library.unwrap().is_stub, "a driver wins, wherever it lies");
}

#[test]
fn what_is_no_library_of_the_target_is_passed_over() {
    let root = Root::new("foreign");
    root.file("usr/lib/x86_64-linux-gnu/libcuda.so", b"INPUT(libcuda.so.1)");
    root.file("usr/lib/x86_64-linux-gnu/libcuda.so.1", b"");
    root.file("usr/lib64/libcuda.so", &elf(ARM));
    let mut narrow = elf(X86);
    narrow[4] = 1;
    root.file("usr/lib/libcuda.so", &narrow);
    fs::create_dir_all(root.at("usr/lib64/libcuda.so.1")).unwrap();
    symlink("/nowhere", root.at("usr/lib/libcuda.so.1")).unwrap();
    let outcome = root.machine().search(&DRIVER);
    assert_eq!(found(&outcome), None);
    assert!(outcome.read.contains(&root.at("usr/lib64/libcuda.so")), "what is passed over was read all the same");
    root.library("usr/local/nvidia/lib64/libcuda.so.1");
    assert_eq!(found(&root.machine().search(&DRIVER)), Some((root.at("usr/local/nvidia/lib64/libcuda.so.1").as_path(), false)));
}

#[test]
fn another_architecture_has_its_own_folders() {
    for (folder, toolkit) in [("usr/lib/aarch64-linux-gnu/tegra", false), ("toolkit/targets/sbsa-linux/lib/stubs", true)] {
        let root = Root::new("arm");
        root.library("usr/lib/x86_64-linux-gnu/libcuda.so");
        root.file(&format!("{folder}/libcuda.so"), &elf(ARM));
        let machine = Machine { architecture: "aarch64".to_owned(), toolkits: vec![root.at("toolkit")], ..root.machine() };
        assert_eq!(found(&machine.search(&DRIVER)), Some((root.at(folder).join("libcuda.so").as_path(), toolkit)));
    }
    let root = Root::new("unknown");
    root.library("usr/lib/libcuda.so");
    assert_eq!(found(&Machine { architecture: "riscv64".to_owned(), ..root.machine() }.search(&DRIVER)), None);
}

#[test]
fn a_folder_named_twice_is_searched_once() {
    let root = Root::new("twice");
    let toolkits = vec![root.at("usr/local/cuda"), root.at("usr/local/cuda")];
    let outcome = Machine { toolkits, ..root.machine() }.search(&DRIVER);
    let mut folders = outcome.searched.clone();
    folders.sort();
    folders.dedup();
    assert_eq!(folders.len(), outcome.searched.len());
    assert!(Library { path: "/a/libcuda.so".into(), is_stub: false }.has_linkers_name());
}

/// A file that any linker takes for an archive.
fn is_empty_archive(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| bytes == b"!<arch>\n")
}

#[test]
fn what_cuda_sys_asks_for_is_there_on_a_machine_without_cuda() {
    let root = Root::new("without");
    let out = root.at("out");
    let supplied = link::for_cuda_sys(&root.machine(), &out).unwrap();
    assert_eq!((&supplied.folders[..], &supplied.read[..]), (&[out.join("cuda-sys")][..], &[][..]));
    for name in ["libcuda.a", "libcudart.a", "libcublas.a"] {
        assert!(is_empty_archive(&supplied.folders[0].join(name)), "{name}");
    }
}

#[test]
fn what_is_there_is_not_hidden() {
    let root = Root::new("hidden");
    let out = root.at("out");
    // A first build left archives behind.
    link::for_cuda_sys(&root.machine(), &out).unwrap();
    root.library("usr/local/cuda/lib64/libcudart.so");
    root.library("usr/lib64/libcuda.so");
    let supplied = link::for_cuda_sys(&root.machine(), &out).unwrap();
    assert_eq!(supplied.folders, [root.at("usr/lib64"), root.at("usr/local/cuda/lib64"), out.join("cuda-sys")]);
    assert_eq!(supplied.read, [root.at("usr/lib64/libcuda.so"), root.at("usr/local/cuda/lib64/libcudart.so")]);
    assert!(is_empty_archive(&out.join("cuda-sys/libcublas.a")));
    assert_eq!(fs::read_dir(out.join("cuda-sys")).unwrap().count(), 1);
    root.library("mine/libcublas.so");
    let machine = Machine { chosen: vec![root.at("mine")], ..root.machine() };
    let supplied = link::for_cuda_sys(&machine, &out).unwrap();
    assert_eq!(supplied.folders, [root.at("usr/lib64"), root.at("usr/local/cuda/lib64"), root.at("mine")]);
    assert!(!out.join("cuda-sys").exists());
}

#[test]
fn a_stub_or_a_library_by_the_loaders_name_does_for_cuda_sys() {
    let root = Root::new("loaders");
    let out = root.at("out");
    root.library("usr/local/cuda/lib64/stubs/libcuda.so");
    root.library("usr/local/cuda/lib64/stubs/libcublas.so");
    let stubs = root.at("usr/local/cuda/lib64/stubs");
    assert_eq!(link::for_cuda_sys(&root.machine(), &out).unwrap().folders, [stubs.clone(), out.join("cuda-sys")]);
    root.library("usr/lib64/libcuda.so.1");
    for _ in 0..2 {
        let supplied = link::for_cuda_sys(&root.machine(), &out).unwrap();
        assert_eq!(supplied.folders, [out.join("cuda"), out.join("cuda-sys"), stubs.clone()]);
        assert_eq!(fs::canonicalize(out.join("cuda/libcuda.so")).unwrap(), fs::canonicalize(root.at("usr/lib64/libcuda.so.1")).unwrap());
        assert!(!out.join("cuda-sys/libcuda.a").exists());
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let root = Root::new("refused");
    root.file("out", b"no folder");
    let error = link::for_cuda_sys(&root.machine(), &root.at("out")).unwrap_err();
    assert!(error.contains("libcuda.a"), "{error}");
}
