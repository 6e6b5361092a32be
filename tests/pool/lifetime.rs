//! Who keeps what alive, and frees of what is not there to be freed.

use crate::support::{DEVICE, Draw, MAPPED, Machine, Owners, SOURCES, Source, free};
use std::sync::Arc;
use std::thread;
use vrampool::driver::sim::{FaultTarget, SimConfig, SimDriver};
use vrampool::driver::{Call, Driver, MemoryKind};
use vrampool::error::{CuResult, InvalidFree};
use vrampool::units::{DeviceId, GIB, KIB, MIB};
use vrampool::{Device, DeviceBuffer, DevicePtr, Pool};

/// Memory that goes with the pool's last handle is pulled from under the buffers that are left.
#[test]
fn buffers_keep_their_memory_when_every_handle_of_the_pool_is_gone() {
    for source in SOURCES {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let clone = pool.clone();
            let sizes = [256, 3 * MIB, 70 * KIB];
            let mut buffers = sizes.map(|size| Some(pool.allocate_buffer(size).unwrap()));
            drop((pool, clone));
            let held = machine.held();
            for index in order {
                let buffer = buffers[index].take().unwrap();
                for other in buffers.iter().flatten().chain([&buffer]) {
                    assert!(machine.is_usable(other.address(), other.size()), "{source:?}");
                }
                // The pool is still there for whoever has a buffer of it.
                assert!(buffer.pool().allocate_buffer(MIB).is_ok());
                assert!(machine.held() >= held);
                if index == 1 { buffer.free().unwrap() } else { drop(buffer) }
            }
            machine.sim.audit().unwrap_or_else(|error| panic!("{source:?}: {error}"));
        }
    }
}

/// A buffer that asks for the current pool when it is freed gives its memory to the wrong one.
#[test]
fn every_buffer_goes_back_to_its_own_pool_and_device() {
    let sim = SimDriver::new(SimConfig::default().device_count(2));
    let device = |id| Device::new(Arc::clone(&sim) as Arc<dyn Driver>, DeviceId(id)).unwrap();
    let kinds = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Managed];
    let pools: Vec<Pool> = (0..2)
        .flat_map(|id| kinds.map(|kind| (id, kind)))
        .map(|(id, kind)| Pool::builder().device(device(id)).kind(kind).build().unwrap())
        .collect();
    let mut buffers: Vec<DeviceBuffer> =
        (0..120).map(|n: usize| pools[n % 6].allocate_buffer([256, 5 * MIB][n / 6 % 2]).unwrap()).collect();
    for pool in &pools {
        assert_eq!(pool.statistics().live_blocks, 20);
    }
    assert!(sim.held_bytes(DeviceId(0)) > 0 && sim.held_bytes(DeviceId(0)) == sim.held_bytes(DeviceId(1)));
    let mut draw = Draw(3);
    let mut left = [20u64; 6];
    while !buffers.is_empty() {
        let buffer = buffers.swap_remove(draw.below(buffers.len() as u64) as usize);
        let owner = pools.iter().position(|pool| pool.device() == buffer.pool().device() && pool.kind() == buffer.pool().kind()).unwrap();
        drop(buffer);
        left[owner] -= 1;
        assert!(pools.iter().zip(left).all(|(pool, left)| pool.statistics().live_blocks == left));
    }
    pools.iter().for_each(|pool| pool.check().unwrap());
    drop(pools);
    sim.audit().unwrap();
}

/// Raw blocks that nobody freed die with the pool and are no leak.
#[test]
fn blocks_that_nobody_freed_go_with_the_pool() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let _ = [1, 64 * KIB, 3 * MIB, 100 * MIB].map(|size| pool.allocate(size).unwrap());
        let raw = pool.allocate_buffer(MIB).unwrap().into_raw();
        assert!(machine.is_usable(raw, MIB));
        machine.finish(pool);
    }
}

/// At process exit, in a forked child, and after a device was reset, the driver has taken its memory along. To hold on to
/// it would be to count what is gone, and to try again for ever.
#[test]
fn memory_that_went_with_the_driver_or_its_context_is_given_back() {
    for source in SOURCES {
        let page = source.page_bytes();
        for code in [CuResult::ERROR_DEINITIALIZED, CuResult::ERROR_CONTEXT_IS_DESTROYED] {
            for from in 0..3 {
                let machine = Machine::large(source);
                let pool = machine.pool();
                let blocks = [page, 5 * page, 3 * page].map(|size| pool.allocate(size).unwrap());
                blocks.into_iter().for_each(|address| free(&pool, address).unwrap());
                let held = machine.held();
                // The driver ends between two calls.
                (from..200).for_each(|k| machine.sim.fail(FaultTarget::MemoryCalls, k, code));
                assert_eq!(pool.trim(0).unwrap(), 0, "{source:?}: {code} from call {from} on");
                assert_eq!(pool.statistics().reserved_bytes, 0);
                pool.check().unwrap();
                // What the driver has no more, it gives to nobody.
                let error = pool.allocate(page).unwrap_err();
                assert!(error.is_driver() && error.code() == Some(code), "{source:?}: {error}");
                drop(pool);
                assert!(machine.held() <= held && machine.held() > 0, "nothing was given back through the ended driver");
            }
        }
    }
}

/// Any other code says that the memory is still there.
#[test]
fn memory_that_the_driver_will_not_take_back_is_kept() {
    for source in SOURCES {
        let page = source.page_bytes();
        for code in [CuResult::ERROR_NOT_INITIALIZED, CuResult::ERROR_INVALID_CONTEXT, CuResult::ERROR_ILLEGAL_ADDRESS, CuResult(710)] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let address = pool.allocate(page).unwrap();
            free(&pool, address).unwrap();
            let held = pool.statistics().reserved_bytes;
            (0..200).for_each(|k| machine.sim.fail(FaultTarget::MemoryCalls, k, code));
            let error = pool.trim(0).unwrap_err();
            assert_eq!((error.is_driver(), error.code()), (true, Some(code)), "{source:?}");
            assert_eq!(pool.statistics().reserved_bytes, held);
            machine.sim.clear_faults();
            assert_eq!(pool.trim(0).unwrap(), 0);
            machine.finish(pool);
        }
    }
}

/// The memory of a pool of which the building failed half-way belongs to nobody.
#[test]
fn a_pool_that_cannot_be_built_leaves_nothing() {
    for source in SOURCES {
        for k in 0..40 {
            let machine = Machine::large(source);
            machine.sim.fail(FaultTarget::AnyCall, k, CuResult::ERROR_UNKNOWN);
            let device = Device::new(Arc::clone(&machine.sim) as Arc<dyn Driver>, DEVICE);
            let built = device.and_then(|device| machine.builder_on(device).initial(9 * source.page_bytes()).build());
            match built {
                Ok(pool) => {
                    machine.sim.clear_faults();
                    machine.finish(pool);
                }
                Err(error) => {
                    assert!(error.is_driver() && error.code() == Some(CuResult::ERROR_UNKNOWN), "{source:?}: call {k}: {error}");
                    machine.sim.audit().unwrap_or_else(|left| panic!("{source:?}: call {k}: {left}"));
                }
            }
        }
    }
}

/// Every address that is not the start of a live block.
fn invalid(machine: &Machine, blocks: &[(DevicePtr, u64)]) -> Vec<(DevicePtr, Option<InvalidFree>)> {
    let mut addresses = Vec::new();
    for &(block, size) in blocks {
        // Inside, as far as the bytes that were asked for go; one before the start is a matter of the neighbour.
        for offset in [1, 2, 255, 256, 257, size / 2, size - 1].into_iter().filter(|&offset| 0 < offset && offset < size) {
            addresses.push((block.offset(offset), Some(InvalidFree::Interior)));
        }
    }
    let top = blocks.iter().map(|&(block, size)| block.address() + size).max().unwrap();
    for address in [1, 255, 256, 4096, 0x7fff_ffff_f000, u64::MAX, u64::MAX - 255, 1 << 63] {
        addresses.push((DevicePtr::new(address), Some(InvalidFree::Foreign)));
    }
    addresses.push((DevicePtr::new(top.next_multiple_of(256)), None));
    addresses.push((DevicePtr::new(top + (1 << 45)), None));
    let on_the_host = 0u64;
    addresses.push((DevicePtr::new(std::ptr::from_ref(&on_the_host).addr() as u64), Some(InvalidFree::Foreign)));
    let other = machine.pool();
    addresses.push((other.allocate(MIB).unwrap(), Some(InvalidFree::Foreign)));
    addresses
}

/// A free that is believed puts a live block, or half of one, where the next request takes it.
#[test]
fn a_free_of_what_is_no_block_is_an_error_and_changes_nothing() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        let sizes = [1, 256, 300, 5000, 64 * KIB, 64 * KIB + 1, MIB, 3 * MIB + 5, 40 * MIB];
        let blocks: Vec<(DevicePtr, u64)> = sizes.iter().map(|&size| (pool.allocate(size).unwrap(), size)).collect();
        let before = machine.check(&pool);
        let calls = machine.memory_calls();
        let addresses = {
            // The other pool lives in the same address space and is gone again.
            let addresses = invalid(&machine, &blocks);
            assert!(addresses.len() > 40);
            addresses
        };
        let made_by_the_other = machine.memory_calls() - calls;
        for &(address, reason) in &addresses {
            let result = thread::scope(|scope| scope.spawn(|| free(&pool, address)).join().unwrap());
            let error = result.err().unwrap_or_else(|| panic!("{source:?}: {address} was freed"));
            assert!(error.is_invalid_argument(), "{error}");
            let found = error.invalid_free_reason().unwrap();
            assert!(reason.is_none_or(|reason| reason == found), "{source:?}: {address}: {found:?}, not {reason:?}");
        }
        let mut expected = before;
        expected.refused_frees += addresses.len() as u64;
        assert_eq!(machine.check(&pool), expected);
        assert_eq!(machine.memory_calls(), calls + made_by_the_other);
        // The null address is the block of no bytes.
        free(&pool, DevicePtr::NULL).unwrap();
        assert_eq!(machine.check(&pool), expected);
        model(&machine, &pool, blocks);
        machine.finish(pool);
    }
}

/// A thousand more operations, with wrong frees among them, against a table of owners.
fn model(machine: &Machine, pool: &Pool, mut live: Vec<(DevicePtr, u64)>) {
    let owners = Owners::default();
    live.iter().for_each(|&(address, size)| owners.take(address, size));
    let mut dead: Vec<DevicePtr> = Vec::new();
    let mut draw = Draw(11);
    for _ in 0..1000 {
        match draw.below(5) {
            0 | 1 => {
                let size = draw.size(23);
                let address = pool.allocate(size).unwrap();
                owners.take(address, size);
                live.push((address, size));
            }
            2 if !live.is_empty() => {
                let (address, _) = live.swap_remove(draw.below(live.len() as u64) as usize);
                owners.give(address);
                free(pool, address).unwrap();
                dead.push(address);
            }
            _ if !dead.is_empty() => {
                let address = dead[draw.below(dead.len() as u64) as usize];
                // A raw address that was allocated again cannot be told from its new owner's.
                if live.iter().all(|&(other, _)| other != address) {
                    assert!(free(pool, address).unwrap_err().invalid_free_reason().is_some());
                }
            }
            _ => {}
        }
        assert_eq!(pool.statistics().live_blocks, live.len() as u64);
    }
    live.into_iter().for_each(|(address, _)| free(pool, address).unwrap());
    assert_eq!(machine.check(pool).live_bytes, 0);
}

/// The second free of a block puts it twice into the free list, and two owners get it.
#[test]
fn a_double_free_is_an_error_in_whatever_state_the_memory_is() {
    for source in SOURCES {
        for size in [1, 256, 5000, 64 * KIB, 64 * KIB + 1, 2 * MIB, 33 * MIB] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let neighbour = pool.allocate(size).unwrap();
            let block = pool.allocate(size).unwrap();
            free(&pool, block).unwrap();
            let wrong = |pool: &Pool, address, what: &str| {
                let before = machine.check(pool);
                let error = free(pool, address).unwrap_err();
                assert!(error.invalid_free_reason().is_some_and(|why| why != InvalidFree::Stale), "{source:?}: {size}: {what}: {error}");
                let mut after = machine.check(pool);
                after.refused_frees -= 1;
                assert_eq!(before, after, "{source:?}: {size}: {what}");
            };
            wrong(&pool, block, "at once");
            thread::scope(|scope| scope.spawn(|| wrong(&pool, block, "on another thread")).join().unwrap());
            free(&pool, neighbour).unwrap();
            wrong(&pool, block, "merged with its neighbours");
            wrong(&pool, neighbour, "merged with its neighbours");
            assert_eq!(pool.trim(0).unwrap(), 0);
            wrong(&pool, block, "given back to the driver");
            // In the middle of a larger block that was made of it.
            let larger = pool.allocate(3 * size + 256).unwrap();
            for address in [block, neighbour] {
                if address != larger {
                    wrong(&pool, address, "within a larger block");
                }
            }
            free(&pool, larger).unwrap();
            machine.finish(pool);
        }
    }
}

/// Two threads that free one block at the same time: one of them does it.
#[test]
fn of_two_frees_at_once_one_is_right() {
    for source in [SOURCES[1], SOURCES[3]] {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for size in [256, 100 * KIB, 3 * MIB] {
            let blocks: Vec<DevicePtr> = (0..200).map(|_| pool.allocate(size).unwrap()).collect();
            let freed: usize = thread::scope(|scope| {
                let work = || blocks.iter().filter(|&&block| free(&pool, block).is_ok()).count();
                let threads = [scope.spawn(work), scope.spawn(work)];
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(freed, blocks.len());
            assert_eq!(machine.check(&pool).live_bytes, 0);
        }
        assert_eq!(pool.statistics().refused_frees, 600);
        machine.finish(pool);
    }
}

/// What a buffer holds is one allocation, not an address: whoever got the address since is left alone.
#[test]
fn a_stale_buffer_never_frees_the_next_owners_block() {
    for source in SOURCES {
        for size in [1, 256, 5000, 64 * KIB, 64 * KIB + 1, 2 * MIB, 33 * MIB] {
            let machine = Machine::large(source);
            let pool = machine.pool();
            let stale = [pool.allocate_buffer(size).unwrap(), pool.allocate_buffer(size).unwrap()];
            let addresses = stale.each_ref().map(DeviceBuffer::address);
            addresses.into_iter().for_each(|address| free(&pool, address).unwrap());
            let mut next = [pool.allocate_buffer(size).unwrap(), pool.allocate_buffer(size).unwrap()];
            next.sort_by_key(DeviceBuffer::address);
            let mut sorted = addresses;
            sorted.sort_unstable();
            assert_eq!(next.each_ref().map(DeviceBuffer::address), sorted, "{source:?}: the test wants the addresses again");
            let before = machine.check(&pool);
            let [first, second] = stale;
            // Told, with the buffer as it was; and asked again, told again.
            let error = first.free().unwrap_err();
            assert_eq!(error.error().invalid_free_reason(), Some(InvalidFree::Stale), "{source:?}: {size}");
            assert!(!error.to_string().is_empty() && std::error::Error::source(&error).is_some());
            let first = error.into_buffer();
            assert_eq!((first.address(), first.size()), (addresses[0], size));
            let first = first.free().unwrap_err().into_buffer();
            drop(first);
            drop(second);
            let mut after = machine.check(&pool);
            assert_eq!(after.refused_frees - before.refused_frees, 3, "two that were told, and one that was only dropped");
            after.refused_frees = before.refused_frees;
            assert_eq!(before, after, "{source:?}: {size}");
            next.into_iter().for_each(|buffer| buffer.free().unwrap());
            machine.finish(pool);
        }
    }
}

/// Freed under the buffer, and not allocated again: there is nothing to free.
#[test]
fn a_buffer_whose_block_is_gone_says_so() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for (size, trims) in [(256, false), (3 * MIB, false), (256, true), (3 * MIB, true)] {
            let buffer = pool.allocate_buffer(size).unwrap();
            free(&pool, buffer.address()).unwrap();
            if trims {
                assert_eq!(pool.trim(0).unwrap(), 0);
            }
            let error = buffer.free().unwrap_err();
            // Where pages are not mapped, a segment that went back is no memory of the pool any more.
            let reason = error.error().invalid_free_reason().unwrap();
            assert!(
                reason == InvalidFree::NotLive || (trims && !source.maps_pages() && reason == InvalidFree::Foreign),
                "{source:?}: {reason:?}"
            );
            drop(error);
        }
        assert_eq!(machine.check(&pool).refused_frees, 4, "each refusal is one");
        machine.finish(pool);
    }
}

/// Ownership that is handed over is freed exactly once.
#[test]
fn a_block_given_up_is_freed_by_its_address_alone() {
    for source in SOURCES {
        let machine = Machine::large(source);
        let pool = machine.pool();
        for size in [1, 64 * KIB, 3 * MIB] {
            let address = pool.allocate_buffer(size).unwrap().into_raw();
            assert_eq!(machine.check(&pool).live_blocks, 1);
            assert!(machine.is_usable(address, size));
            free(&pool, address).unwrap();
            assert!(free(&pool, address).is_err());
        }
        assert_eq!(pool.allocate_buffer(0).unwrap().into_raw(), DevicePtr::NULL);
        // Through threads and collections, too.
        let buffers: Vec<DeviceBuffer> = (0..100).map(|n| pool.allocate_buffer(n * 700).unwrap()).collect();
        thread::spawn(move || drop(buffers)).join().unwrap();
        assert_eq!(machine.check(&pool).live_blocks, 0);
        machine.finish(pool);
    }
}

/// The largest pool and the smallest request: a pool on 140 GiB costs nothing before it is used.
#[test]
fn an_unused_pool_asks_nothing_of_the_driver() {
    for source in MAPPED.into_iter().chain([Source::Plain(MemoryKind::Pinned, Default::default())]) {
        let machine = Machine::new(source, 140 * GIB);
        let pool = machine.pool();
        assert_eq!(machine.memory_calls(), 0);
        machine.finish(pool);
        assert_eq!(machine.memory_calls(), 0);
    }
}

/// A driver may say that a device maps pages and then not do it, as in some containers and virtual machines.
#[test]
fn a_driver_that_does_not_support_mapping_after_all_gets_plain_allocations() {
    for source in MAPPED {
        let machine = Machine::large(source);
        machine.sim.fail(Call::MemGranularity, 0, CuResult::ERROR_NOT_SUPPORTED);
        let pool = machine.builder().initial(MIB).build().unwrap();
        let buffers = [300, 3 * MIB, 40 * MIB].map(|size| pool.allocate_buffer(size).unwrap());
        assert_eq!(machine.sim.calls(Call::MemAddressReserve) + machine.sim.calls(Call::MemCreate), 0, "{source:?}");
        assert!(buffers.iter().all(|buffer| machine.is_usable(buffer.address(), buffer.size())));
        drop(buffers);
        machine.finish(pool);
        // Any other code is a failure, which may go away.
        for code in [CuResult::ERROR_NOT_PERMITTED, CuResult::ERROR_UNKNOWN, CuResult::ERROR_INVALID_DEVICE, CuResult(12_345)] {
            machine.sim.fail(Call::MemGranularity, 0, code);
            let error = machine.builder().build().unwrap_err();
            assert_eq!((error.is_driver(), error.code()), (true, Some(code)), "{source:?}");
        }
    }
}
