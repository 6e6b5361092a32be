//! Handles that are made for something: for network cards, or to be shared with other processes.

use super::{INVALID, NOT_SUPPORTED, Suite};
use crate::driver::{AccessDescriptor, AccessFlags, HandleProperties, HandleTypes, StreamHandle};
use crate::error::CuResult;

impl Suite<'_> {
    pub(super) fn purposes(&mut self, unit: u64) {
        let Self { driver, device, report } = self;
        let device = *device;
        let Ok(able) = driver.device_properties(device) else { return };
        let plain = HandleProperties::on(device);
        let granularity = driver.mem_granularity(&plain);
        let access = [AccessDescriptor { device, flags: AccessFlags::ReadWrite }];
        let (fd, fabric) = (HandleTypes::FILE_DESCRIPTOR, HandleTypes::FABRIC);
        let Some(at) = report.works("a unit of addresses", driver.mem_address_reserve(unit, 0)) else { return };
        for (name, rdma, shareable) in [
            ("a handle for RDMA", true, HandleTypes::NONE),
            ("a handle for descriptors", false, fd),
            ("a handle for RDMA and descriptors", true, fd),
            ("a handle for the fabric", false, fabric),
            ("a handle for descriptors and the fabric", false, fd | fabric),
            ("a handle for everything", true, fd | fabric),
        ] {
            let properties = HandleProperties { rdma, shareable, ..plain };
            report.add("the granularity is that of plain memory", granularity, driver.mem_granularity(&properties));
            let made = driver.mem_create(unit, &properties);
            if (rdma && !able.rdma) || !able.shareable.contains(shareable) {
                report.refused(name, made, NOT_SUPPORTED);
                continue;
            }
            // The device has such handles, but whether a process may make them is the system's affair.
            if shareable.contains(fabric) && made == Err(CuResult::ERROR_NOT_PERMITTED) {
                report.refused(name, made, CuResult::ERROR_NOT_PERMITTED);
                continue;
            }
            let Some(handle) = report.works(name, made) else { continue };
            report.works("map", driver.mem_map(at, unit, 0, handle));
            report.works("access", driver.mem_set_access(at, unit, &access));
            report.works("fill", driver.memset_d8_async(device, at, 1, unit, StreamHandle::LEGACY));
            report.works("which is done", driver.context_synchronize(device));
            report.works("unmap", driver.mem_unmap(at, unit));
            report.works("release", driver.mem_release(handle));
        }
        report.works("address free", driver.mem_address_free(at, unit));
        for (name, bits) in [("a Windows handle", 2), ("a Windows kernel handle", 4), ("a descriptor and a Windows handle", 1 | 2)] {
            let properties = HandleProperties { shareable: HandleTypes::from_bits(bits), ..plain };
            report.refused(name, driver.mem_create(unit, &properties), INVALID);
        }
        let unknown = HandleProperties { shareable: HandleTypes::from_bits(1 << 30), ..plain };
        if let Some(handle) = report.works("a handle type that there is not is passed over", driver.mem_create(unit, &unknown)) {
            report.works("release", driver.mem_release(handle));
        }
    }
}
