//! The conformance suite as a program: what a driver must do and must refuse, checked on the device at hand.
//!
//! It prints every check with what came of it, and ends with status 1 where one did not pass.

use clap::{Parser, ValueEnum};
use std::process::ExitCode;
use std::sync::Arc;
use vrampool::Device;
use vrampool::driver::sim::SimDriver;
use vrampool::driver::{Driver, conformance};
use vrampool::units::DeviceId;

/// Checks a driver against the rules that the pool relies on.
#[derive(Parser)]
struct Arguments {
    /// The device: sim, or cuda:N
    #[arg(long, default_value = "cuda:0")]
    device: String,
    /// Which checks to make
    #[arg(long, value_enum, default_value_t = Suite::Sound)]
    suite: Suite,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Everything that leaves the device as it was
    Sound,
    /// What is answered after a kernel failed; the process's context is broken afterwards
    Broken,
}

fn device(text: &str) -> Result<(Arc<dyn Driver>, DeviceId), String> {
    if text == "sim" {
        return Ok((SimDriver::h200(), DeviceId(0)));
    }
    let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()).ok_or("it is neither sim nor cuda:N")?;
    let device = Device::cuda(ordinal).map_err(|error| error.to_string())?;
    Ok((device.driver().clone(), device.id()))
}

fn main() -> ExitCode {
    let Arguments { device: text, suite } = Arguments::parse();
    let (driver, device) = match device(&text) {
        Ok(found) => found,
        Err(error) => {
            eprintln!("conformance: {text}: {error}");
            return ExitCode::from(2);
        }
    };
    let report = match suite {
        Suite::Sound => conformance::run(&*driver, device),
        Suite::Broken => conformance::run_broken(&*driver, device),
    };
    print!("{report}");
    let failed = report.failures().len();
    println!("{text}: {} checks, {failed} failed", report.checks().len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
