//! A pool from the environment's variables. Each scenario is a process of its own: variables are a process's.

use std::env;
use std::process::Command;
use vrampool::driver::DeviceChoice;
use vrampool::{Error, Pool, PoolBuilder};

const CHILD: &str = "VRAMPOOL_ENVIRONMENT_CHILD";

/// What a child found.
fn found() -> Result<String, Error> {
    let pool = PoolBuilder::from_env()?.build()?;
    let name = if DeviceChoice::from_env()? == DeviceChoice::Simulated { "simulated" } else { "CUDA" };
    Ok(format!("{name} {} [{}]", pool.device(), pool.config()))
}

/// Not a test: what the children run.
#[test]
fn child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    match found() {
        Ok(text) => println!("\nfound: {text}"),
        Err(error) if error.is_invalid_argument() => println!("\ninvalid: {error}"),
        Err(error) if error.is_unavailable() => println!("\nunavailable: {error}"),
        Err(error) => println!("\nother: {error}"),
    }
}

/// What a process with these variables finds. It has no CUDA.
fn with(device: Option<&str>, config: Option<&str>) -> String {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["child", "--exact", "--nocapture"]).env(CHILD, "1").env("VRAMPOOL_LIBCUDA", "/nowhere/libcuda.so.1");
    command.env_remove("VRAMPOOL_DEVICE").env_remove("VRAMPOOL_CONFIG");
    if let Some(device) = device {
        command.env("VRAMPOOL_DEVICE", device);
    }
    if let Some(config) = config {
        command.env("VRAMPOOL_CONFIG", config);
    }
    let output = command.output().expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = |line: &&str| ["found: ", "invalid: ", "unavailable: ", "other: "].iter().any(|begin| line.starts_with(begin));
    text.lines().find(said).unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn options_come_from_the_environment() {
    assert_eq!(with(Some("sim"), None), "found: simulated 0 []");
    assert_eq!(with(Some("sim"), Some("")), "found: simulated 0 []");
    let config = "initial=2097152,maximum=8388608,rdma=true,shareable=fd";
    assert_eq!(with(Some("sim"), Some(config)), format!("found: simulated 0 [{config}]"));
    for (config, why) in [
        ("inital=64MiB", "invalid: VRAMPOOL_CONFIG: option 'inital' is not known"),
        ("maximum", "invalid: VRAMPOOL_CONFIG: option 'maximum' is not of the form key=value"),
        ("rdma=maybe", "invalid: VRAMPOOL_CONFIG: option 'rdma': 'maybe' is not true or false"),
        ("rdma=true,no_vmm=true", "invalid: rdma is for memory from virtual memory management"),
    ] {
        let answer = with(Some("sim"), Some(config));
        assert!(answer.starts_with(why), "{answer}");
    }
}

#[test]
fn the_device_comes_from_the_environment_and_is_never_made_up() {
    for device in [None, Some(""), Some("auto"), Some("cuda:0")] {
        let answer = with(device, None);
        assert!(answer.starts_with("unavailable: "), "{device:?}: {answer}");
    }
    for device in ["tpu", "SIM", "cuda", "cuda:", "cuda:-1", "cuda:1x", "0"] {
        assert_eq!(with(Some(device), None), format!("invalid: VRAMPOOL_DEVICE: '{device}' is none of auto, sim, cuda:N"));
    }
    assert_eq!("cuda:7".parse(), Ok(DeviceChoice::Cuda(7)));
}

#[test]
fn what_is_set_afterwards_wins() {
    let builder = Pool::builder().configure_from_env().expect("the tests' own environment has no VRAMPOOL_CONFIG that is wrong");
    assert!(builder.clone().growth(4096).config().contains("growth=4096"));
    assert!(builder.kind(vrampool::driver::MemoryKind::Pinned).config().contains("kind=pinned"));
}
