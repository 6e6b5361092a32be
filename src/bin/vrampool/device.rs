//! Which device the program runs on.

use crate::{Failure, output};
use vrampool::Device;
use vrampool::driver::DeviceChoice;
use vrampool::units::{Bytes, DeviceId};

const SIMULATED: &str = "sim";

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
pub(crate) fn select(option: Option<DeviceChoice>) -> Result<Selected, Failure> {
    let choice = match option {
        Some(choice) => choice,
        None => DeviceChoice::from_env()?,
    };
    let simulated = || Selected { device: Device::simulated(), name: SIMULATED.to_owned() };
    match choice {
        DeviceChoice::Simulated => Ok(simulated()),
        DeviceChoice::Cuda(ordinal) => match Device::cuda(ordinal) {
            Ok(device) => Ok(Selected { name: format!("cuda:{ordinal}"), device }),
            Err(error) if error.is_unavailable() => Err(Failure::Usage(format!("cuda:{ordinal} cannot be used: {error}"))),
            Err(error) => Err(error.into()),
        },
        DeviceChoice::Auto => match Device::first() {
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
