//! The driver's own stream-ordered allocator.

use super::{INVALID, NO_MEMORY, NOT_SUPPORTED, Suite};
use crate::driver::{StreamFlags, StreamHandle};
use crate::error::CuResult;
use crate::units::{DevicePtr, MIB};

impl Suite<'_> {
    pub(super) fn stream_ordered(&mut self) {
        let Self { driver, device, report } = self;
        let device = *device;
        let Ok(properties) = driver.device_properties(device) else { return };
        let legacy = StreamHandle::LEGACY;
        if !properties.memory_pools {
            report.refused("in a stream's order without pools", driver.mem_alloc_async(device, MIB, legacy), NOT_SUPPORTED);
            let at = DevicePtr::new(4096);
            report.refused("its free without pools", driver.mem_free_async(device, at, legacy), NOT_SUPPORTED);
            report.refused("a threshold without pools", driver.mem_pool_threshold(device, 0), NOT_SUPPORTED);
            return;
        }
        report.works("a threshold", driver.mem_pool_threshold(device, u64::MAX));
        report.add("0 bytes in a stream's order", Ok::<_, CuResult>(DevicePtr::NULL), driver.mem_alloc_async(device, 0, legacy));
        let too_much = driver.mem_alloc_async(device, properties.total_bytes + (1 << 30), legacy);
        report.refused("more than there is in a stream's order", too_much, NO_MEMORY);
        report.works("null freed in a stream's order", driver.mem_free_async(device, DevicePtr::NULL, legacy));
        let Some(created) = report.works("a stream", driver.stream_create(device, StreamFlags::NonBlocking)) else { return };
        for stream in [StreamHandle::DEFAULT, legacy, StreamHandle::PER_THREAD, created] {
            for bytes in [1, 256, 300, MIB, 3 * MIB] {
                let Some(at) = report.works("allocating in a stream's order", driver.mem_alloc_async(device, bytes, stream)) else {
                    continue;
                };
                report.add("the address is a multiple of 256", true, at.is_aligned_to(256));
                report.works("filling it in that order", driver.memset_d8_async(device, at, 1, bytes, stream));
                report.works("freeing it in that order", driver.mem_free_async(device, at, stream));
                report.works("all of that is done", driver.stream_synchronize(device, stream));
                report.refused("freeing it twice", driver.mem_free_async(device, at, stream), INVALID);
            }
        }
        let pair = [(); 2].map(|()| report.works("one of two", driver.mem_alloc_async(device, MIB, created)));
        if let [Some(one), Some(two)] = pair {
            report.add("two that live do not overlap", true, one.address().abs_diff(two.address()) >= MIB);
            report.refused("freeing what lies inside", driver.mem_free_async(device, one.offset(256), created), INVALID);
            report.works("both are there", driver.stream_synchronize(device, created));
            report.works("freeing one on another stream", driver.mem_free_async(device, one, StreamHandle::PER_THREAD));
            report.works("freeing one", driver.mem_free_async(device, two, created));
        }
        report.works("synchronizing", driver.context_synchronize(device));
        report.works("no threshold", driver.mem_pool_threshold(device, 0));
        report.works("nothing is kept", driver.context_synchronize(device));
        report.works("destroying the stream", driver.stream_destroy(created));
    }
}
