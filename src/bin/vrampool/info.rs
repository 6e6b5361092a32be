//! `vrampool info`: the driver and its devices.

use crate::args::InfoArguments;
use crate::device::{Selected, select};
use crate::{Failure, output, table};
use serde_json::{Value, json};
use std::process::ExitCode;
use vrampool::Device;
use vrampool::driver::{DeviceProperties, Granularity, HandleProperties, MemoryInfo};
use vrampool::error::CuResult;
use vrampool::units::{Bytes, DeviceId};

/// What is known of one device.
struct Entry {
    name: String,
    properties: DeviceProperties,
    memory: MemoryInfo,
    /// `None` without virtual memory management.
    granularity: Option<Granularity>,
}

pub(crate) fn run(arguments: &InfoArguments) -> Result<ExitCode, Failure> {
    let selected = select(arguments.common.device)?;
    let driver = selected.device.driver();
    let version = driver.version().map_err(|code| refused("cuDriverGetVersion", code))?;
    let version = format!("{}.{}", version / 1000, version % 1000 / 10);
    let devices = driver.device_count().map_err(|code| refused("cuDeviceGetCount", code))?;
    let entries = (0..devices).map(|ordinal| entry(&selected, DeviceId(ordinal))).collect::<Result<Vec<_>, _>>()?;
    if arguments.common.json {
        let devices: Vec<Value> = entries.iter().map(to_json).collect();
        let (driver, library) = binding(&selected)?.map_or(("simulated", None), |(how, library)| (how, Some(library)));
        output::print_json(&json!({ "driver": driver, "library": library, "driver_version": version, "devices": devices }))?;
    } else {
        let driver = binding(&selected)?.map_or("simulated".to_owned(), |(how, library)| format!("{how}: {library}"));
        let mut text = format!("driver: {driver}, CUDA {version}\n");
        for entry in &entries {
            text.push_str(&format!("\n{}: {}\n", entry.name, entry.properties.name));
            text.push_str(&table::properties(&rows(entry)));
        }
        output::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How the CUDA driver is bound, and its library; `None` for the simulated device.
#[cfg(target_os = "linux")]
fn binding(selected: &Selected) -> Result<Option<(&'static str, String)>, Failure> {
    use vrampool::driver::cuda::{Binding, CudaDriver};
    if selected.is_simulated() {
        return Ok(None);
    }
    // The driver of the selected device: a process has one.
    let driver = CudaDriver::load()?;
    let how = if matches!(driver.binding(), Binding::Linked(_)) { "linked" } else { "run time" };
    Ok(Some((how, driver.binding().path().display().to_string())))
}

/// The CUDA driver is bound on Linux only.
#[cfg(not(target_os = "linux"))]
fn binding(_: &Selected) -> Result<Option<(&'static str, String)>, Failure> {
    Ok(None)
}

fn refused(call: &str, code: CuResult) -> Failure {
    Failure::Work(format!("{call} failed with {code}"))
}

fn entry(selected: &Selected, id: DeviceId) -> Result<Entry, Failure> {
    let driver = selected.device.driver();
    let properties = Device::new(driver.clone(), id)?.properties()?;
    let granularity = match properties.virtual_memory_management {
        true => {
            let granularity = driver.mem_granularity(&HandleProperties::on(id));
            Some(granularity.map_err(|code| refused("cuMemGetAllocationGranularity", code))?)
        }
        false => None,
    };
    Ok(Entry {
        name: selected.name_of(id),
        memory: driver.memory_info(id).map_err(|code| refused("cuMemGetInfo", code))?,
        properties,
        granularity,
    })
}

fn to_json(entry: &Entry) -> Value {
    let properties = &entry.properties;
    json!({
        "device": entry.name,
        "name": properties.name,
        "total_bytes": properties.total_bytes,
        "free_bytes": entry.memory.free_bytes,
        "compute_capability": format!("{}.{}", properties.compute_capability.0, properties.compute_capability.1),
        "virtual_memory_management": properties.virtual_memory_management,
        "granularity_bytes": entry.granularity.map(|granularity| granularity.minimum_bytes),
        "recommended_granularity_bytes": entry.granularity.map(|granularity| granularity.recommended_bytes),
        "managed_memory": properties.managed_memory,
        "memory_pools": properties.memory_pools,
        "integrated": properties.integrated,
        "stream_ids": properties.stream_ids,
        "rdma": properties.rdma,
        "shareable": properties.shareable.to_string(),
    })
}

fn rows(entry: &Entry) -> Vec<(&'static str, String)> {
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    let properties = &entry.properties;
    vec![
        ("memory", Bytes(properties.total_bytes).to_string()),
        ("free now", Bytes(entry.memory.free_bytes).to_string()),
        ("compute capability", format!("{}.{}", properties.compute_capability.0, properties.compute_capability.1)),
        ("virtual memory management", yes(properties.virtual_memory_management)),
        ("granularity of mappings", entry.granularity.map_or("–".to_owned(), |granularity| Bytes(granularity.minimum_bytes).to_string())),
        ("managed memory", yes(properties.managed_memory)),
        ("driver's own memory pools", yes(properties.memory_pools)),
        ("memory shared with the host", yes(properties.integrated)),
        ("ids of streams", yes(properties.stream_ids)),
        ("handles for RDMA", yes(properties.rdma)),
        ("handles to share", properties.shareable.to_string()),
    ]
}
