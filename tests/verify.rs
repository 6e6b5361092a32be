//! Replays that are verified: sound ones find nothing, and what is planted is found and named.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use vrampool::driver::sim::{SimConfig, SimDriver};
use vrampool::driver::{
    AccessDescriptor, CaptureMode, CaptureStatus, DeviceProperties, Driver, DriverResult, EventHandle, FunctionHandle, Granularity,
    HandleProperties, KernelArgument, LaunchConfig, MemoryInfo, MemoryKind, ModuleHandle, PhysicalHandle, StreamFlags, StreamHandle,
};
use vrampool::error::CuResult;
use vrampool::trace::{Action, Passes, Report, Trace, Verification, replay, replay_verified};
use vrampool::units::{DeviceId, DevicePtr, MIB};
use vrampool::{Device, Pool};

const D0: DeviceId = DeviceId(0);

/// What a [`Saboteur`] does to a fill or to a block, counting the fills of the trace from one.
#[derive(Clone, Copy, Debug)]
enum Plan {
    Nothing,
    /// Leaves out every fill whose number is a multiple of this.
    DropEvery(u64),
    /// Writes a byte at that offset of the block of that fill, behind the fill.
    Corrupt {
        fill: u64,
        offset: u64,
    },
    /// Has that fill fail.
    Fail(u64),
}

/// A driver that obeys, but for its plan.
#[derive(Debug)]
struct Saboteur {
    driver: Arc<SimDriver>,
    plan: Plan,
    fills: Mutex<u64>,
}

macro_rules! forward {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty;)*) => {
        $(
            fn $name(&self $(, $argument: $type)*) -> DriverResult<$result> {
                self.driver.$name($($argument),*)
            }
        )*
    };
}

impl Driver for Saboteur {
    forward! {
        fn version(&self) -> i32;
        fn device_count(&self) -> u32;
        fn device_properties(&self, device: DeviceId) -> DeviceProperties;
        fn can_access_peer(&self, device: DeviceId, peer: DeviceId) -> bool;
        fn memory_info(&self, device: DeviceId) -> MemoryInfo;
        fn mem_granularity(&self, properties: &HandleProperties) -> Granularity;
        fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DevicePtr;
        fn mem_address_free(&self, address: DevicePtr, bytes: u64) -> ();
        fn mem_set_access(&self, address: DevicePtr, bytes: u64, access: &[AccessDescriptor]) -> ();
        fn stream_create(&self, device: DeviceId, flags: StreamFlags) -> StreamHandle;
        fn stream_destroy(&self, stream: StreamHandle) -> ();
        fn stream_id(&self, device: DeviceId, stream: StreamHandle) -> u64;
        fn stream_query(&self, device: DeviceId, stream: StreamHandle) -> bool;
        fn stream_synchronize(&self, device: DeviceId, stream: StreamHandle) -> ();
        fn stream_wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> ();
        fn stream_capture_status(&self, device: DeviceId, stream: StreamHandle) -> CaptureStatus;
        fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> CaptureMode;
        fn event_create(&self, device: DeviceId) -> EventHandle;
        fn event_destroy(&self, event: EventHandle) -> ();
        fn event_record(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> ();
        fn event_query(&self, event: EventHandle) -> bool;
        fn event_synchronize(&self, event: EventHandle) -> ();
        fn context_synchronize(&self, device: DeviceId) -> ();
        fn memcpy_async(
            &self,
            device: DeviceId,
            destination: DevicePtr,
            source: DevicePtr,
            bytes: u64,
            stream: StreamHandle,
        ) -> ();
        fn memcpy_host_to_device(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> ();
        fn memcpy_device_to_host(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> ();
        fn memset_d8_async(
            &self,
            device: DeviceId,
            address: DevicePtr,
            value: u8,
            bytes: u64,
            stream: StreamHandle,
        ) -> ();
        fn launch_host_function(
            &self,
            device: DeviceId,
            stream: StreamHandle,
            function: Box<dyn FnOnce() + Send>,
        ) -> ();
        fn module_load(&self, device: DeviceId, image: &[u8]) -> ModuleHandle;
        fn module_unload(&self, device: DeviceId, module: ModuleHandle) -> ();
        fn module_function(&self, module: ModuleHandle, name: &str) -> FunctionHandle;
        fn mem_alloc(&self, device: DeviceId, kind: MemoryKind, bytes: u64) -> DevicePtr;
        fn mem_free(&self, device: DeviceId, kind: MemoryKind, address: DevicePtr) -> ();
        fn mem_create(&self, bytes: u64, properties: &HandleProperties) -> PhysicalHandle;
        fn mem_release(&self, handle: PhysicalHandle) -> ();
        fn mem_map(&self, address: DevicePtr, bytes: u64, offset: u64, handle: PhysicalHandle) -> ();
        fn mem_unmap(&self, address: DevicePtr, bytes: u64) -> ();
    }

    fn launch_kernel(
        &self,
        device: DeviceId,
        function: FunctionHandle,
        config: LaunchConfig,
        stream: StreamHandle,
        arguments: &[KernelArgument],
    ) -> DriverResult<()> {
        // Of the kernels used here `fill` alone takes three arguments; its first launch is the verifier's proof.
        let &[KernelArgument::Pointer(block), _, _] = arguments else {
            return self.driver.launch_kernel(device, function, config, stream, arguments);
        };
        let mut fills = self.fills.lock().unwrap();
        let number = *fills;
        *fills += 1;
        match self.plan {
            Plan::DropEvery(period) if number > 0 && number.is_multiple_of(period) => return Ok(()),
            Plan::Fail(fill) if number == fill => return Err(CuResult::ERROR_LAUNCH_FAILED),
            _ => {}
        }
        self.driver.launch_kernel(device, function, config, stream, arguments)?;
        match self.plan {
            Plan::Corrupt { fill, offset } if number == fill => {
                let mut byte = [0];
                self.driver.memcpy_device_to_host(device, &mut byte, block.offset(offset))?;
                self.driver.memcpy_host_to_device(device, block.offset(offset), &[!byte[0]])
            }
            _ => Ok(()),
        }
    }

    fn modelled_ns(&self) -> Option<u64> {
        self.driver.modelled_ns()
    }
}

fn trace(rows: &str) -> Trace {
    Trace::read("test", format!("Thread,Time,Action,Pointer,Size,Stream\n{rows}").as_bytes()).expect("the trace is good")
}

fn recorded(name: &str) -> Trace {
    Trace::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces").join(name)).expect("a trace")
}

fn verified(trace: &Trace, passes: u32, plan: Plan) -> Report {
    let driver = SimDriver::new(SimConfig::default().capacity(256 * MIB).backed(true));
    let device = Device::new(Arc::new(Saboteur { driver: driver.clone(), plan, fills: Mutex::new(0) }), D0).expect("a device");
    let passes = Passes::Exactly(NonZeroU32::new(passes).expect("not zero"));
    let report = replay_verified(trace, &device, Pool::builder(), passes, &mut |_| {}).expect("it runs");
    driver.audit().expect("nothing is left");
    report
}

fn verification(report: &Report) -> &Verification {
    report.verification.as_ref().expect("it was verified")
}

/// Sizes with and without whole words and tails, some freed and some left.
const ROWS: &str = "1,0,allocate,1,4097,0\n1,1,allocate,2,3,0\n1,2,allocate,3,3000002,0\n1,3,allocate,4,0,0\n\
    1,4,free,1,4097,0\n1,5,allocate,1,4096,0\n1,6,allocate failure,(nil),77,0\n1,7,free,3,3000002,0\n1,8,allocate,3,1,0\n";

#[test]
fn a_sound_pool_is_found_sound() {
    let report = verified(&trace(ROWS), 3, Plan::Nothing);
    let verification = verification(&report);
    assert_eq!((report.failed, verification.mismatches, &verification.first), (0, 0, &None));
    assert_eq!(verification.bytes, 3 * (4097 + 3 + 3_000_002 + 4096 + 77 + 1));
    let report = verified(&recorded("rmm.csv"), 2, Plan::Nothing);
    assert_eq!((report.failed, report.verification.map(|verification| verification.mismatches)), (0, Some(0)));
}

#[test]
fn the_figures_are_those_of_the_pool_alone() {
    let trace = recorded("small_model.csv.gz");
    let report = verified(&trace, 1, Plan::Nothing);
    assert_eq!((verification(&report).mismatches, verification(&report).blocks), (0, trace.allocations() as u64));
    let device = Device::new(SimDriver::new(SimConfig::default().capacity(256 * MIB)), D0).expect("a device");
    let plain = replay(&trace, &device, Pool::builder(), Passes::Exactly(NonZeroU32::MIN), &mut |_| {}).expect("it runs");
    assert_eq!(plain.verification, None);
    assert_eq!(report.driver_calls_cold, plain.driver_calls_cold);
    assert_eq!(report.driver_time_cold, plain.driver_time_cold);
    assert_eq!(report.peak_reserved_bytes, plain.peak_reserved_bytes);
}

#[test]
fn fills_that_are_left_out_are_found() {
    let trace = recorded("small_model.csv.gz");
    let report = verified(&trace, 1, Plan::DropEvery(100));
    let verification = verification(&report);
    // Blocks without a whole word are not filled by the kernel.
    let fills = trace.events().iter().filter(|event| event.action() == Action::Allocate && event.size() >= 4).count() as u64;
    assert_eq!(verification.mismatches, fills / 100);
    assert_eq!(report.failed, 0, "a mismatch is no failed request");
}

#[test]
fn the_first_mismatch_is_named_with_its_block_and_words() {
    let named = |fill, offset| {
        let report = verified(&trace(ROWS), 1, Plan::Corrupt { fill, offset });
        let verification = verification(&report);
        assert_eq!(verification.mismatches, 1);
        let first = verification.first.clone().expect("a mismatch");
        assert_eq!(first.pass, 1);
        (first.index, first.allocated, first.size, first.words)
    };
    // Fills by kernel: events 0, 2, 5, 6; event 1 has no whole word.
    assert_eq!(named(1, 0), (Some(4), 0, 4097, 1));
    assert_eq!(named(1, 4095), (Some(4), 0, 4097, 1), "the last word");
    assert_eq!(named(2, 2_999_999), (Some(7), 2, 3_000_002, 1));
    assert_eq!(named(3, 17), (None, 5, 4096, 1), "left live");
    assert_eq!(named(4, 8), (Some(6), 6, 77, 1), "freed at once");

    let report = verified(&trace("1,0,allocate,1,4099,0\n1,1,free,1,4099,0\n"), 3, Plan::DropEvery(2));
    let first = verification(&report).first.clone().expect("a mismatch");
    assert_eq!((first.index, first.allocated, first.pass, first.words), (Some(1), 0, 2, 1024), "what another pass left is no match");
}

#[test]
fn a_fill_that_fails_is_a_failed_request() {
    let report = verified(&trace(ROWS), 1, Plan::Fail(2));
    let first = report.first_failure.as_ref().expect("a failure");
    assert_eq!((report.failed, first.index, first.error.code()), (1, 2, Some(CuResult::ERROR_LAUNCH_FAILED)));
    assert_eq!(verification(&report).mismatches, 0);
}

#[test]
fn a_device_without_memory_cannot_verify() {
    let driver = SimDriver::h200();
    let device = Device::new(driver.clone(), D0).expect("a device");
    let error = replay_verified(&trace(ROWS), &device, Pool::builder(), Passes::Steady, &mut |_| {}).expect_err("no bytes");
    assert!(error.is_unavailable(), "{error}");
    driver.audit().expect("nothing is left");
}
