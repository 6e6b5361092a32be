//! A device: a driver and an ordinal; and which one the environment names.

use super::{DeviceProperties, Driver};
use crate::error::{CuResult, Error, Result};
use crate::sync::Arc;
use crate::units::DeviceId;
use std::str::FromStr;

/// One device of a driver. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
    id: DeviceId,
}

impl Device {
    /// The device with this ordinal.
    ///
    /// # Errors
    /// [`Error::is_unavailable`] where the driver has no such device.
    pub fn new(driver: Arc<dyn Driver>, id: DeviceId) -> Result<Self> {
        match driver.device_properties(id) {
            Ok(_) => Ok(Self { driver, id }),
            Err(CuResult::ERROR_INVALID_DEVICE) => Err(Error::unavailable(format!("there is no device {id}"))),
            Err(code) => Err(Error::driver("cuDeviceGetAttribute", code)),
        }
    }

    /// The first CUDA device.
    ///
    /// # Errors
    /// [`Error::is_unavailable`] where there is no CUDA driver or no device, saying what was tried.
    pub fn first() -> Result<Self> {
        Self::cuda(0)
    }

    /// The CUDA device with this ordinal, of [the process's driver](super::cuda::CudaDriver::load).
    ///
    /// # Errors
    /// [`Error::is_unavailable`] where there is no CUDA driver or no such device, saying what was tried.
    #[cfg(target_os = "linux")]
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Self::new(super::cuda::CudaDriver::load()?, DeviceId(ordinal))
    }

    /// The CUDA device with this ordinal.
    ///
    /// # Errors
    /// [`Error::is_unavailable`]: the CUDA driver is bound on Linux only.
    #[cfg(not(target_os = "linux"))]
    pub fn cuda(_ordinal: u32) -> Result<Self> {
        Err(Error::unavailable("no CUDA device: the CUDA driver is bound on Linux only"))
    }

    /// A simulated device with the size and the costs of an H200. Its addresses lead to no memory.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn simulated() -> Self {
        Self { driver: super::sim::SimDriver::h200(), id: DeviceId(0) }
    }

    /// The driver that the device belongs to.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The device's ordinal.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// What the device is and can do.
    ///
    /// # Errors
    /// [`Error::is_driver`].
    pub fn properties(&self) -> Result<DeviceProperties> {
        self.driver.device_properties(self.id).map_err(|code| Error::driver("cuDeviceGetAttribute", code))
    }
}

/// Which device to take. As text, in the variable `VRAMPOOL_DEVICE` and the program's `--device`: `auto`, `sim`, or `cuda:N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceChoice {
    /// The first CUDA device.
    #[default]
    Auto,
    /// The simulated device.
    Simulated,
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

/// The variable that names the device.
const VARIABLE: &str = "VRAMPOOL_DEVICE";

impl DeviceChoice {
    /// What the variable `VRAMPOOL_DEVICE` names; [`Self::Auto`] where it is unset or empty.
    ///
    /// # Errors
    /// [`Error::is_invalid_argument`] for another text.
    pub fn from_env() -> Result<Self> {
        match std::env::var_os(VARIABLE) {
            Some(value) if !value.is_empty() => {
                value.to_string_lossy().parse().map_err(|error| Error::invalid_argument(format!("{VARIABLE}: {error}")))
            }
            _ => Ok(Self::default()),
        }
    }

    /// The device. It is a simulated one only where that is what was chosen.
    ///
    /// # Errors
    /// [`Error::is_unavailable`] where it is not there.
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Auto => Device::first(),
            Self::Cuda(ordinal) => Device::cuda(ordinal),
            #[cfg(feature = "sim")]
            Self::Simulated => Ok(Device::simulated()),
            #[cfg(not(feature = "sim"))]
            Self::Simulated => Err(Error::unavailable("the simulated device is not built in (feature sim)")),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    /// # Errors
    /// A text that names no device.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Simulated),
            _ => text
                .strip_prefix("cuda:")
                .filter(|ordinal| ordinal.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| format!("'{text}' is none of auto, sim, cuda:N")),
        }
    }
}
