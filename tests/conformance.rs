//! The conformance suite over every shape of simulated machine.

use vrampool::driver::conformance::{self, Report};
use vrampool::driver::sim::{PlainPlacement, SimConfig, SimDriver};
use vrampool::driver::{Driver, HandleTypes, Meter};
use vrampool::units::{DeviceId, GIB, KIB, MIB};

fn assert_passes(report: &Report, at_least: usize, what: &str) {
    assert!(report.failures().is_empty(), "{what}:\n{report}");
    assert!(report.checks().len() >= at_least, "{what}: only {} checks", report.checks().len());
}

#[test]
fn every_simulated_machine_conforms() {
    for granularity in [64 * KIB, 2 * MIB, 32 * MIB] {
        for vmm in [true, false] {
            for backed in [true, false] {
                for devices in [1, 2] {
                    let config = SimConfig::default().capacity(GIB).granularity(granularity).virtual_memory_management(vmm);
                    let driver = SimDriver::new(config.device_count(devices).backed(backed));
                    let report = conformance::run(&*driver, DeviceId(devices as u32 - 1));
                    let what = format!("granularity {granularity}, vmm {vmm}, backed {backed}, {devices} devices");
                    assert_passes(&report, if vmm { 200 } else { 90 }, &what);
                    assert_eq!(driver.audit(), Ok(()), "{what}");
                }
            }
        }
    }
}

#[test]
fn other_choices_of_addresses_and_values_conform() {
    for placement in [PlainPlacement::Driver, PlainPlacement::Adjacent, PlainPlacement::Odd] {
        for reuse in [true, false] {
            for backed in [true, false] {
                let config = SimConfig::default().capacity(GIB).placement(placement).reuse(reuse).multi_unmap(true).backed(backed);
                let driver = SimDriver::new(config);
                let what = format!("{placement:?}, reuse {reuse}, backed {backed}");
                assert_passes(&conformance::run(&*driver, DeviceId(0)), 200, &what);
                assert_eq!(driver.audit(), Ok(()), "{what}");
            }
        }
    }
}

#[test]
fn a_broken_context_conforms() {
    for backed in [true, false] {
        let driver = SimDriver::new(SimConfig::default().capacity(GIB).backed(backed));
        assert_passes(&conformance::run_broken(&*driver, DeviceId(0)), 30, "broken");
        let left = driver.audit().unwrap_err();
        assert_eq!(left.lines().count(), 1, "only the module stays: {left}");
    }
}

#[test]
fn the_meter_changes_nothing_and_ends_at_zero() {
    let driver = SimDriver::new(SimConfig::default().capacity(GIB));
    let meter = Meter::new(driver.clone());
    assert_passes(&conformance::run(&meter, DeviceId(0)), 200, "metered");
    assert_eq!(meter.reserved_bytes(), 0);
    assert!(meter.peak_reserved_bytes() >= driver.peak_bytes(DeviceId(0)));
    assert_eq!(meter.counts().total(), driver.calls(vrampool::driver::sim::FaultTarget::AnyCall));
    assert_eq!(driver.audit(), Ok(()));
    assert_eq!(meter.modelled_ns(), driver.modelled_ns());
}

#[test]
fn machines_without_handles_for_something_conform() {
    let fd = HandleTypes::FILE_DESCRIPTOR;
    for (rdma, shareable, permitted) in [
        (false, fd | HandleTypes::FABRIC, true),
        (true, fd, true),
        (true, HandleTypes::NONE, true),
        (true, fd | HandleTypes::FABRIC, false),
    ] {
        let config = SimConfig::default().capacity(GIB).rdma(rdma).shareable(shareable).fabric_permitted(permitted);
        let driver = SimDriver::new(config);
        let report = conformance::run(&*driver, DeviceId(0));
        let what = format!("rdma {rdma}, {shareable:?}, permitted {permitted}");
        assert_passes(&report, 200, &what);
        assert_eq!(driver.audit(), Ok(()), "{what}");
        // Each lack shows in what was refused.
        let refused = |name: &str| report.checks().iter().find(|check| check.name == name).unwrap().observed.clone();
        assert_eq!(refused("a handle for RDMA").contains("801"), !rdma, "{report}");
        assert_eq!(refused("a handle for descriptors").contains("801"), shareable.is_empty(), "{report}");
        let fabric = refused("a handle for descriptors and the fabric");
        assert_eq!(fabric.contains("801"), !shareable.contains(HandleTypes::FABRIC), "{fabric}");
        assert_eq!(fabric.contains("800"), !permitted, "{fabric}");
    }
}
