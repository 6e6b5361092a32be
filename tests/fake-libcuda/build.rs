//! Names the library as the driver's is named, so that a program linked with it asks for `libcuda.so.1`, and has it use
//! its own functions whatever else is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
