//! Which device the program runs on.

use crate::{Failure, output};
use std::str::FromStr;
use vrampool::Device;
use vrampool::units::{Bytes, DeviceId};

const VARIABLE: &str = "VRAMPOOL_DEVICE";
const SIMULATED: &str = "sim";

/// What the user asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Choice {
    #[default]
    Auto,
    Simulated,
    Cuda(u32),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            SIMULATED => Ok(Self::Simulated),
            _ => text
                .strip_prefix("cuda:")
                .filter(|ordinal| ordinal.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| format!("'{text}' is none of auto, sim, cuda:N")),
        }
    }
}

/// The device that was found.
pub(crate) struct Selected {
    pub(crate) device: Device,
    /// As the option spells it: `sim`.
    pub(crate) name: String,
}

impl Selected {
    pub(crate) fn is_simulated(&self) -> bool {
        self.name == SIMULATED
    }

    /// The name of another device of the same driver.
    pub(crate) fn name_of(&self, id: DeviceId) -> String {
        // One simulated device is `sim`, as there are no others to choose.
        if self.is_simulated() { self.name.clone() } else { format!("cuda:{id}") }
    }

    /// The device as people know it: its name and memory.
    pub(crate) fn description(&self) -> Result<String, Failure> {
        let properties = self.device.properties()?;
        Ok(format!("{}, {}", properties.name, Bytes(properties.total_bytes)))
    }
}

/// Finds the device of the option, or else of the environment.
pub(crate) fn select(option: Option<Choice>) -> Result<Selected, Failure> {
    let choice = match option {
        Some(choice) => choice,
        None => from_environment()?,
    };
    let simulated = || Selected { device: Device::simulated(), name: SIMULATED.to_owned() };
    match choice {
        Choice::Simulated => Ok(simulated()),
        Choice::Cuda(ordinal) => match Device::cuda(ordinal) {
            Ok(device) => Ok(Selected { name: format!("cuda:{ordinal}"), device }),
            Err(error) if error.is_unavailable() => Err(Failure::Usage(format!("cuda:{ordinal} cannot be used: {error}"))),
            Err(error) => Err(error.into()),
        },
        Choice::Auto => match Device::first() {
            Ok(device) => Ok(Selected { name: format!("cuda:{}", device.id()), device }),
            Err(error) if error.is_unavailable() => {
                let selected = simulated();
                output::complain(&format!("no CUDA device to be had: using the simulated device ({})", selected.description()?));
                Ok(selected)
            }
            Err(error) => Err(error.into()),
        },
    }
}

fn from_environment() -> Result<Choice, Failure> {
    match std::env::var_os(VARIABLE) {
        None => Ok(Choice::default()),
        Some(value) if value.is_empty() => Ok(Choice::default()),
        Some(value) => value.to_string_lossy().parse().map_err(|error| Failure::Usage(format!("{VARIABLE}: {error}"))),
    }
}
