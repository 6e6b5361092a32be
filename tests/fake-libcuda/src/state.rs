//! The one machine of the process: its contexts, and which of them each handle belongs to.

use crate::entry::{Answer, EXITED};
use crate::profile::Profile;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use vrampool::driver::sim::SimDriver;
use vrampool::driver::{Driver, EventHandle, MemoryKind, ModuleHandle, StreamHandle};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr};

/// The process that called `cuInit`; 0 before.
static INITIALIZED_BY: AtomicU32 = AtomicU32::new(0);
static TEXT: Mutex<Option<String>> = Mutex::new(None);
static FAKE: OnceLock<Fake> = OnceLock::new();

/// Where the values of contexts begin.
const FIRST_CONTEXT: u64 = 0x5900_0000_1000;
const CONTEXT_STEP: u64 = 0x1000;

thread_local! {
    /// The calling thread's contexts, the current one last.
    static STACK: RefCell<Vec<DeviceId>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Fake {
    pub(crate) profile: Profile,
    pub(crate) sim: Arc<SimDriver>,
    tables: Mutex<Tables>,
}

/// What each handle is of. A handle is entered after it was made and taken out before it goes: the simulated device may
/// give its value again at once.
#[derive(Default)]
pub(crate) struct Tables {
    /// References to each device's primary context.
    pub(crate) references: HashMap<DeviceId, u32>,
    pub(crate) streams: HashMap<u64, DeviceId>,
    pub(crate) events: HashMap<u64, DeviceId>,
    pub(crate) modules: HashMap<u64, DeviceId>,
    /// Functions: the module's value, and the kernel's name.
    pub(crate) functions: HashMap<u64, (u64, String)>,
    pub(crate) plain: HashMap<u64, (DeviceId, MemoryKind)>,
    /// What went with contexts that were destroyed before it.
    swept: String,
}

/// The machine. It is made at first use.
pub(crate) fn fake() -> &'static Fake {
    FAKE.get_or_init(|| {
        let text = TEXT.lock().unwrap_or_else(PoisonError::into_inner).take();
        let text = text.or_else(|| std::env::var("VRAMPOOL_FAKE").ok()).unwrap_or_default();
        let profile = Profile::parse(&text).unwrap_or_else(|error| panic!("fake libcuda: {error}, in {text:?}"));
        let sim = SimDriver::new(profile.sim.clone());
        Fake { profile, sim, tables: Mutex::default() }
    })
}

/// Sets the profile of the machine to be made.
pub(crate) fn configure(text: &str) -> Result<(), String> {
    Profile::parse(text)?;
    if FAKE.get().is_some() {
        return Err("the machine is made already".into());
    }
    *TEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
    Ok(())
}

extern "C" fn exiting() {
    EXITED.store(true, Ordering::SeqCst);
}

/// What `cuInit` does.
pub(crate) fn initialize(fake: &Fake) -> Answer {
    if fake.profile.sim.devices.is_empty() {
        return Err(CuResult::ERROR_NO_DEVICE);
    }
    if INITIALIZED_BY.swap(std::process::id(), Ordering::SeqCst) == 0 {
        // SAFETY: a function without arguments that stays loaded: the library is never closed (atexit(3)).
        unsafe { libc::atexit(exiting) };
    }
    Ok(())
}

pub(crate) fn is_initialized() -> bool {
    INITIALIZED_BY.load(Ordering::SeqCst) != 0
}

/// Whether a parent of this process called `cuInit`, and not the process itself.
pub(crate) fn is_forked_child() -> bool {
    let process = INITIALIZED_BY.load(Ordering::SeqCst);
    process != 0 && process != std::process::id()
}

/// The value of a device's primary context.
pub(crate) fn context_of(device: DeviceId) -> u64 {
    FIRST_CONTEXT + CONTEXT_STEP * u64::from(device.0)
}

/// Does something with the calling thread's stack of contexts; at the end of a thread it is gone.
pub(crate) fn with_stack<T>(work: impl FnOnce(&mut Vec<DeviceId>) -> T) -> Result<T, CuResult> {
    STACK.try_with(|stack| work(&mut stack.borrow_mut())).map_err(|_| CuResult::ERROR_INVALID_CONTEXT)
}

impl Fake {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device that is there.
    pub(crate) fn device(&self, ordinal: i32) -> Result<DeviceId, CuResult> {
        let count = self.profile.sim.devices.len();
        let device = u32::try_from(ordinal).ok().filter(|&device| (device as usize) < count);
        device.map(DeviceId).ok_or(CuResult::ERROR_INVALID_DEVICE)
    }

    /// The device whose primary context a value is.
    pub(crate) fn device_of_context(&self, context: u64) -> Result<DeviceId, CuResult> {
        let index = context.checked_sub(FIRST_CONTEXT).filter(|offset| offset.is_multiple_of(CONTEXT_STEP));
        let index = index.map(|offset| offset / CONTEXT_STEP).filter(|&index| index < self.profile.sim.devices.len() as u64);
        index.map(|index| DeviceId(index as u32)).ok_or(CuResult::ERROR_INVALID_CONTEXT)
    }

    /// The device whose context is current.
    pub(crate) fn current(&self) -> Result<DeviceId, CuResult> {
        let device = with_stack(|stack| stack.last().copied())?.ok_or(CuResult::ERROR_INVALID_CONTEXT)?;
        if self.tables().references.contains_key(&device) { Ok(device) } else { Err(CuResult::ERROR_CONTEXT_IS_DESTROYED) }
    }

    /// The device that a stream is on. One that is not live is left to the simulated device to refuse.
    pub(crate) fn device_of_stream(&self, stream: StreamHandle) -> Result<DeviceId, CuResult> {
        if stream.is_default() {
            return self.current();
        }
        Ok(self.tables().streams.get(&stream.0).copied().unwrap_or(DeviceId(0)))
    }

    pub(crate) fn retain(&self, device: DeviceId) -> u64 {
        *self.tables().references.entry(device).or_insert(0) += 1;
        context_of(device)
    }

    pub(crate) fn release(&self, device: DeviceId) -> Answer {
        let mut tables = self.tables();
        let references = tables.references.get_mut(&device).ok_or(CuResult::ERROR_INVALID_CONTEXT)?;
        *references -= 1;
        if *references == 0 {
            tables.references.remove(&device);
            self.sweep(tables, device);
        }
        Ok(())
    }

    /// Destroys what is left in a context. A broken one keeps it.
    fn sweep(&self, mut tables: MutexGuard<'_, Tables>, device: DeviceId) {
        let streams = take(&mut tables.streams, |&of| of == device);
        let events = take(&mut tables.events, |&of| of == device);
        let modules = take(&mut tables.modules, |&of| of == device);
        let plain = take(&mut tables.plain, |&(of, _)| of == device);
        for (what, count) in
            [("streams", streams.len()), ("events", events.len()), ("modules", modules.len()), ("allocations", plain.len())]
        {
            if count > 0 {
                _ = writeln!(tables.swept, "{count} {what} were left in the context of device {device}");
            }
        }
        drop(tables);
        streams.into_iter().for_each(|(stream, _)| _ = self.sim.stream_destroy(StreamHandle(stream)));
        events.into_iter().for_each(|(event, _)| _ = self.sim.event_destroy(EventHandle(event)));
        modules.into_iter().for_each(|(module, _)| _ = self.sim.module_unload(device, ModuleHandle(module)));
        plain.into_iter().for_each(|(at, (_, kind))| _ = self.sim.mem_free(device, kind, DevicePtr::new(at)));
    }

    /// What was taken and not given back, a line each.
    pub(crate) fn outstanding(&self) -> String {
        let mut report = self.sim.audit().err().unwrap_or_default();
        let tables = self.tables();
        for (device, references) in &tables.references {
            _ = writeln!(report, "primary context of device {device}: {references} references");
        }
        report.push_str(&tables.swept);
        report
    }
}

fn take<V>(table: &mut HashMap<u64, V>, choose: impl Fn(&V) -> bool) -> Vec<(u64, V)> {
    table.extract_if(|_, value| choose(value)).collect()
}
