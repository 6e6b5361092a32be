//! The fake library's controls, and scenarios in processes of their own.

use crate::library;
use libloading::os::unix::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::Path;
use std::process::Command;
use std::{env, ptr};

const CHILD: &str = "VRAMPOOL_FAKE_CHILD";
const DONE: &str = "the scenario is done";

/// Whether this process runs one scenario.
pub(crate) fn is_child() -> bool {
    env::var_os(CHILD).is_some()
}

/// Runs a scenario in a process of its own for each of some profiles of the fake machine (the parent's part), or in this
/// one (the child's).
pub(crate) fn in_children<W: FnOnce()>(profiles: &[&str], scenario: W) {
    let path = library::full();
    in_children_with(profiles.iter().map(|profile| (*profile, path)), scenario);
}

/// The same, with a library for each.
pub(crate) fn in_children_with<'a, W: FnOnce()>(machines: impl IntoIterator<Item = (&'a str, &'a Path)>, scenario: W) {
    if is_child() {
        scenario();
        report_done();
        return;
    }
    for (profile, library) in machines {
        let (succeeded, output) = spawn(std::any::type_name::<W>(), profile, library);
        assert!(succeeded && output.contains(DONE), "with {profile:?}, {}:\n{output}", library.display());
    }
}

/// Says that the scenario has come to its end: a child that ran nothing does not. It may be said at the process's exit.
pub(crate) fn report_done() {
    let line = format!("\n{DONE}\n");
    // SAFETY: the text is valid for its length (write(2)).
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
}

/// Runs the test that a closure stands in, again.
fn spawn(closure: &str, profile: &str, library: &Path) -> (bool, String) {
    let test = closure.split_once("::").map_or(closure, |(_, path)| path).trim_end_matches("::{{closure}}");
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([test, "--exact", "--nocapture"]);
    command.env(CHILD, "1").env("VRAMPOOL_FAKE", profile).env("VRAMPOOL_LIBCUDA", library);
    // A program that is linked with the driver's library finds it in the same folder.
    let folder = library.parent().expect("the library lies in a folder");
    command.env("LD_LIBRARY_PATH", folder);
    let output = command.output().expect("this program runs");
    let text = format!("{}\n{}\n{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

/// The controls of a fake library. The binding and a test that open the same file have the same machine.
pub(crate) struct Fake(Library);

impl Fake {
    /// The child's library.
    pub(crate) fn of_child() -> Self {
        Self::open(library::full())
    }

    pub(crate) fn open(path: &Path) -> Self {
        // SAFETY: the fake library's initialisers do nothing. It stays loaded: the binding never unloads it, and where a test
        // alone has it, the handle lives as long as what is called.
        Self(unsafe { Library::new(path) }.expect("the fake library"))
    }

    /// A function of the library, of the type that its documentation or cuda.h gives.
    ///
    /// # Safety
    /// `T` is the function's type.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the caller's promise.
        *unsafe { self.0.get::<T>(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn text(name: &str) -> CString {
        CString::new(name).expect("a name")
    }

    /// Has the `k`-th call from now on fail, or each for a `k` below 0.
    pub(crate) fn fail(&self, function: &str, k: i64, code: i32) {
        // SAFETY: the type that the control has.
        let fail = unsafe { self.function::<extern "C" fn(*const c_char, i64, c_int) -> c_int>("fake_fail") };
        assert_eq!(fail(Self::text(function).as_ptr(), k, code), 0, "{function}");
    }

    /// Takes planned failures back: how many had not struck.
    pub(crate) fn clear(&self) -> usize {
        // SAFETY: the type that the control has.
        unsafe { self.function::<extern "C" fn() -> usize>("fake_fail_clear")() }
    }

    /// How often a function was called, or all of them.
    pub(crate) fn calls(&self, function: &str) -> u64 {
        // SAFETY: the type that the control has.
        let calls = unsafe { self.function::<extern "C" fn(*const c_char) -> u64>("fake_calls") };
        calls(Self::text(function).as_ptr())
    }

    /// What is outstanding, a line each.
    pub(crate) fn outstanding(&self) -> String {
        self.long_text("fake_outstanding")
    }

    /// Every function and the version of CUDA that it came with.
    pub(crate) fn symbols(&self) -> Vec<(String, i32)> {
        let text = self.long_text("fake_symbols");
        let lines = text.lines().map(|line| line.split_once(' ').expect("a name and a version"));
        lines.map(|(name, since)| (name.to_owned(), since.parse().expect("a version"))).collect()
    }

    fn long_text(&self, control: &str) -> String {
        // SAFETY: the type that both controls have.
        let give = unsafe { self.function::<extern "C" fn(*mut c_char, usize) -> usize>(control) };
        let mut buffer = vec![0_u8; give(ptr::null_mut(), 0) + 1];
        give(buffer.as_mut_ptr().cast(), buffer.len());
        buffer.pop();
        String::from_utf8(buffer).expect("text")
    }

    /// The calling thread's current context, and how many it has on its stack.
    pub(crate) fn context(&self) -> (u64, usize) {
        // SAFETY: the types that the controls have.
        unsafe {
            (
                self.function::<extern "C" fn() -> u64>("fake_current_context")(),
                self.function::<extern "C" fn() -> usize>("fake_context_depth")(),
            )
        }
    }

    /// How often a device's primary context is retained.
    pub(crate) fn references(&self, device: u32) -> u32 {
        // SAFETY: the type that the control has.
        unsafe { self.function::<extern "C" fn(u32) -> u32>("fake_context_references")(device) }
    }

    /// Breaks a device's context.
    pub(crate) fn poison(&self, device: u32, code: i32) {
        // SAFETY: the type that the control has.
        unsafe { self.function::<extern "C" fn(u32, c_int)>("fake_poison")(device, code) }
    }

    /// What calls do after the driver has gone.
    pub(crate) fn after_exit(&self, mode: i32) {
        // SAFETY: the type that the control has.
        unsafe { self.function::<extern "C" fn(c_int)>("fake_after_exit")(mode) }
    }
}
