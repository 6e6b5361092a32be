//! Memory made for something: for network cards, or to be shared.

use crate::support::{MAPPED, Machine, SOURCES};
use vrampool::driver::sim::SimConfig;
use vrampool::driver::{Call, HandleTypes, MemoryKind};
use vrampool::error::CuResult;
use vrampool::units::{GIB, MIB};
use vrampool::{Error, Pool, PoolBuilder};

const FD: HandleTypes = HandleTypes::FILE_DESCRIPTOR;
const FABRIC: HandleTypes = HandleTypes::FABRIC;

fn wished(builder: PoolBuilder, rdma: bool, shareable: HandleTypes) -> PoolBuilder {
    builder.rdma(rdma).shareable(shareable)
}

/// Every handle of the pool is made for what was asked, however the pool comes to it, and the pool says so.
#[test]
fn every_page_is_made_for_what_was_asked() {
    for source in MAPPED {
        for (rdma, shareable) in [(false, HandleTypes::NONE), (true, HandleTypes::NONE), (false, FD), (true, FD), (true, FD | FABRIC)] {
            let machine = Machine::new(source, GIB);
            let pool = wished(machine.builder(), rdma, shareable).initial(64 * MIB).growth(96 * MIB).build().unwrap();
            let told = pool.handle_properties().unwrap();
            assert_eq!((told.rdma, told.shareable), (rdma, shareable));
            for size in [300, 20 * MIB, 60 * MIB, 200 * MIB] {
                let buffer = pool.allocate_buffer(size).unwrap();
                for offset in (0..size).step_by(MIB as usize) {
                    assert_eq!(machine.sim.piece_at(buffer.address().offset(offset)).unwrap().made_for, Some(told));
                }
            }
            drop(pool);
            assert_eq!(machine.sim.audit(), Ok(()));
        }
    }
}

fn assert_refused(result: Result<Pool, Error>, is: impl Fn(&Error) -> bool, words: &[&str]) {
    let error = result.expect_err("it is refused");
    assert!(is(&error), "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
    }
}

/// What a device, or the system, does not let a pool have is refused when the pool is built, by name, and nothing is held.
#[test]
fn what_is_not_to_be_had_is_refused_by_name() {
    type Change = fn(SimConfig) -> SimConfig;
    let cases: [(Change, bool, HandleTypes, &[&str]); 8] = [
        (|config| config.rdma(false), true, FD, &["device 0", "network cards", "rdma"]),
        (|config| config.shareable(FABRIC), false, FD, &["device 0", "shareable=fd"]),
        (|config| config.shareable(FD), true, FABRIC | FD, &["device 0", "shareable=fabric"]),
        (|config| config.shareable(HandleTypes::NONE), false, FD | FABRIC, &["shareable=fd+fabric"]),
        (|config| config.virtual_memory_management(false), true, HandleTypes::NONE, &["virtual memory management"]),
        (|config| config.virtual_memory_management(false), false, FD, &["virtual memory management"]),
        (|config| config.fabric_permitted(false), false, FABRIC, &["CUDA_ERROR_NOT_PERMITTED", "shareable=fabric", "IMEX"]),
        (|config| config, false, HandleTypes::from_bits(2), &["shareable=0x2"]),
    ];
    for (change, rdma, shareable, words) in cases {
        let machine = Machine::with(MAPPED[1], GIB, change);
        let builder = || machine.builder().initial(64 * MIB);
        assert_refused(wished(builder(), rdma, shareable).build(), Error::is_unavailable, words);
        assert_eq!(machine.sim.peak_bytes(machine.device().id()), 0, "nothing was taken");
        assert_eq!(machine.sim.audit(), Ok(()));
        // A pool that asks for nothing special is served by the same device, and says what it has.
        let plain = builder().build().unwrap();
        assert!(plain.handle_properties().is_none_or(|has| !has.rdma && has.shareable.is_empty()));
    }
}

/// What contradicts itself is refused whatever the device.
#[test]
fn contradictions_are_refused_before_the_driver_is_asked() {
    let machine = Machine::new(MAPPED[1], GIB);
    let before = machine.sim.calls(vrampool::driver::sim::FaultTarget::AnyCall);
    let device = machine.device();
    for (builder, words) in [
        (Pool::builder().rdma(true).no_vmm(true), ["rdma", "no_vmm"]),
        (Pool::builder().shareable(FD).no_vmm(true), ["shareable", "no_vmm"]),
        (Pool::builder().rdma(true).kind(MemoryKind::Pinned), ["rdma", "kind=pinned"]),
        (Pool::builder().shareable(FABRIC).kind(MemoryKind::Managed), ["shareable", "kind=managed"]),
    ] {
        assert_refused(builder.clone().build(), Error::is_invalid_argument, &words);
        assert_refused(builder.device(device.clone()).build(), Error::is_invalid_argument, &words);
    }
    // Making the device asked it what it is.
    assert_eq!(machine.sim.calls(vrampool::driver::sim::FaultTarget::AnyCall) - before, 1);
}

/// One page is tried when the pool is built. No failure of that leaves anything, and a lack of memory is none.
#[test]
fn the_trial_page_leaves_nothing_and_keeps_to_the_maximum() {
    let machine = Machine::new(MAPPED[1], GIB);
    let id = machine.device().id();
    let builder = || machine.builder().rdma(true).maximum(2 * MIB);
    let pool = builder().build().unwrap();
    assert_eq!((machine.sim.peak_bytes(id), machine.sim.held_bytes(id)), (2 * MIB, 0));
    pool.allocate_buffer(MIB).unwrap();
    drop(pool);
    machine.sim.fail(Call::MemCreate, 0, CuResult::ERROR_OUT_OF_MEMORY);
    builder().build().unwrap().allocate_buffer(MIB).unwrap();
    machine.sim.fail(Call::MemCreate, 0, CuResult::ERROR_UNKNOWN);
    assert_refused(builder().build(), |error| error.code() == Some(CuResult::ERROR_UNKNOWN), &["cuMemCreate"]);
    // A page that would not go at once goes at the second try.
    machine.sim.fail(Call::MemRelease, 0, CuResult::ERROR_UNKNOWN);
    builder().build().unwrap();
    assert_eq!(machine.sim.audit(), Ok(()));
    // Plain memory needs no trial.
    machine.sim.fail(Call::MemCreate, 0, CuResult::ERROR_NOT_PERMITTED);
    drop(machine.builder().build().unwrap());
    assert_eq!(machine.sim.faults_planned(), 1);
}

/// Without virtual memory management by choice, none of its calls is made, and the pool works as on a device without it.
#[test]
fn no_vmm_makes_plain_allocations_only() {
    for source in SOURCES {
        let machine = Machine::new(source, GIB);
        let pool = machine.builder().no_vmm(true).initial(8 * MIB).build().unwrap();
        assert_eq!((pool.handle_properties(), pool.page_bytes()), (None, 2 * MIB));
        let buffers: Vec<_> = [300, 3 * MIB, 40 * MIB].map(|size| pool.allocate_buffer(size).unwrap()).into();
        for buffer in &buffers {
            assert_eq!(machine.sim.piece_at(buffer.address()).unwrap().made_for, None, "{source:?}");
        }
        drop(buffers);
        assert_eq!(pool.trim(0).unwrap(), 0);
        for call in [Call::MemCreate, Call::MemAddressReserve, Call::MemMap, Call::MemGranularity] {
            assert_eq!(machine.sim.calls(call), 0, "{call:?}");
        }
        drop(pool);
        assert_eq!(machine.sim.audit(), Ok(()));
    }
}

/// A pool tells its options, and a pool built from what it tells is the same.
#[test]
fn a_pool_is_built_again_from_what_it_tells() {
    for text in [
        "",
        "kind=pinned",
        "kind=managed,initial=2097152",
        "maximum=8388609",
        "growth=4194304,alignment=512",
        "rdma=true",
        "shareable=fd+fabric",
        "no_vmm=true",
    ] {
        let machine = Machine::new(MAPPED[1], GIB);
        let build = |config: &str| Pool::builder().configure(config).unwrap().device(machine.device()).build().unwrap();
        let first = build(text);
        assert_eq!(first.config(), text);
        let second = build(&first.config());
        assert_eq!(second.config(), text);
        assert_eq!((first.statistics(), first.kind(), first.page_bytes()), (second.statistics(), second.kind(), second.page_bytes()));
        assert_eq!(first.handle_properties(), second.handle_properties());
    }
}
