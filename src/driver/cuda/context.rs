//! Primary contexts: each is retained once, made current where a call needs it, and the thread's own is put back.

use super::process;
use super::sys::{Context, Device, Functions};
use crate::driver::DriverResult;
use crate::error::CuResult;
use crate::sync::Mutex;
use crate::units::DeviceId;
use std::ptr;
use std::sync::OnceLock;

/// The primary contexts of all devices.
#[derive(Debug)]
pub(super) struct Contexts {
    slots: Box<[Slot]>,
    /// Held while a context is retained: it is retained once, whoever comes first.
    retaining: Mutex<()>,
}

/// A device's primary context, once somebody has needed it.
#[derive(Debug, Default)]
struct Slot(OnceLock<Retained>);

#[derive(Clone, Copy, Debug)]
struct Retained {
    /// The context, as a pointer of exposed provenance.
    context: u64,
    /// The driver's handle of its device: the reference is given up without asking for it again.
    device: Device,
}

/// A device's primary context is current until this is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Bound<'a> {
    functions: &'a Functions,
    context: Context,
    /// Whether it stands on top of what the thread had.
    is_pushed: bool,
}

impl Contexts {
    pub(super) fn new(devices: u32) -> Self {
        Self { slots: (0..devices).map(|_| Slot::default()).collect(), retaining: Mutex::new(()) }
    }

    /// Makes a device's primary context current. Costs one look where it is so already.
    ///
    /// # Errors
    /// [`CuResult::ERROR_INVALID_DEVICE`], or the driver's code; the thread's context is as it was.
    pub(super) fn bind<'a>(&self, functions: &'a Functions, device: DeviceId) -> DriverResult<Bound<'a>> {
        let context = self.primary(functions, device)?;
        match current(functions) {
            Ok(now) if now == context => Ok(Bound { functions, context, is_pushed: false }),
            // What cannot be told, such as one that was destroyed, is put back all the same.
            _ => push(functions, context),
        }
    }

    /// Makes sure that some context is current, for calls about a handle, which knows its own context.
    ///
    /// # Errors
    /// As for [`Contexts::bind`].
    pub(super) fn bind_any<'a>(&self, functions: &'a Functions) -> DriverResult<Bound<'a>> {
        if let Ok(context) = current(functions)
            && !context.is_null()
        {
            return Ok(Bound { functions, context, is_pushed: false });
        }
        let retained = self.slots.iter().position(|slot| !slot.load().is_null());
        self.bind(functions, DeviceId(retained.unwrap_or(0) as u32))
    }

    fn primary(&self, functions: &Functions, device: DeviceId) -> DriverResult<Context> {
        let slot = self.slots.get(device.0 as usize).ok_or(CuResult::ERROR_INVALID_DEVICE)?;
        let context = slot.load();
        if context.is_null() { self.retain(functions, device, slot) } else { Ok(context) }
    }

    #[cold]
    #[inline(never)]
    fn retain(&self, functions: &Functions, device: DeviceId, slot: &Slot) -> DriverResult<Context> {
        let device = ordinal(functions, device)?;
        let _retaining = self.retaining.lock();
        let mut context = slot.load();
        if context.is_null() {
            // SAFETY: Primary Context Management, cuDevicePrimaryCtxRetain: the device is cuDeviceGet's, and the result goes
            // to a local.
            check(unsafe { (functions.primary_ctx_retain)(&raw mut context, device) })?;
            slot.0.get_or_init(|| Retained { context: context.expose_provenance() as u64, device });
        }
        Ok(context)
    }

    /// Lets go of every context that was retained.
    pub(super) fn release(&mut self, functions: &Functions) {
        for retained in self.slots.iter_mut().filter_map(|slot| slot.0.take()) {
            let release = functions.primary_ctx_release_v2.unwrap_or(functions.primary_ctx_release);
            // Nobody is left to tell of a failure.
            // SAFETY: Primary Context Management, cuDevicePrimaryCtxRelease: the device's context was retained once.
            _ = unsafe { release(retained.device) };
        }
    }
}

impl Slot {
    /// The context, or null while nobody has needed it.
    fn load(&self) -> Context {
        ptr::with_exposed_provenance_mut(self.0.get().map_or(0, |retained| retained.context as usize))
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if self.is_pushed && process::running().is_ok() && pop(self.functions).is_err() {
            pop_once_more(self.functions, self.context);
        }
    }
}

fn pop(functions: &Functions) -> DriverResult<()> {
    let mut popped = ptr::null_mut();
    // SAFETY: Context Management, cuCtxPopCurrent: this thread pushed a context, and the result goes to a local.
    check(unsafe { (functions.ctx_pop_current)(&raw mut popped) })
}

/// A failure may be that of earlier work rather than of the call. Whether the context is gone shows: only one that was
/// not current is ever pushed. The call between has its result already, and a failure here changes nothing about it.
#[cold]
#[inline(never)]
fn pop_once_more(functions: &Functions, pushed: Context) {
    if current(functions) == Ok(pushed) {
        _ = pop(functions);
    }
}

fn current(functions: &Functions) -> DriverResult<Context> {
    let mut context = ptr::null_mut();
    // SAFETY: Context Management, cuCtxGetCurrent: the result goes to a local.
    check(unsafe { (functions.ctx_get_current)(&raw mut context) })?;
    Ok(context)
}

fn push(functions: &Functions, context: Context) -> DriverResult<Bound<'_>> {
    // SAFETY: Context Management, cuCtxPushCurrent: the context is retained for as long as the driver is used.
    check(unsafe { (functions.ctx_push_current)(context) })?;
    Ok(Bound { functions, context, is_pushed: true })
}

/// The driver's handle of a device.
///
/// # Errors
/// [`CuResult::ERROR_INVALID_DEVICE`].
pub(super) fn ordinal(functions: &Functions, device: DeviceId) -> DriverResult<Device> {
    let ordinal = i32::try_from(device.0).map_err(|_| CuResult::ERROR_INVALID_DEVICE)?;
    let mut handle = 0;
    // SAFETY: Device Management, cuDeviceGet: the result goes to a local; an ordinal without a device is refused.
    check(unsafe { (functions.device_get)(&raw mut handle, ordinal) })?;
    Ok(handle)
}

/// The code as a result.
pub(super) fn check(code: CuResult) -> DriverResult<()> {
    if code.is_success() { Ok(()) } else { Err(code) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::cuda::sys;
    use std::cell::RefCell;
    use std::ffi::{CStr, c_int, c_void};
    use std::ptr::NonNull;

    /// A driver of nothing but contexts, one for each thread, so that tests do not meet.
    #[derive(Default)]
    struct Fake {
        stack: Vec<usize>,
        retained: usize,
        released: usize,
        pushes: usize,
        /// What the next of these calls answers.
        fail: Option<(&'static str, CuResult)>,
        /// How many more pops fail, and whether the context goes all the same.
        failing_pops: usize,
        pops_all_the_same: bool,
    }

    std::thread_local! {
        static FAKE: RefCell<Fake> = RefCell::default();
    }

    fn with<T>(work: impl FnOnce(&mut Fake) -> T) -> T {
        FAKE.with(|fake| work(&mut fake.borrow_mut()))
    }

    fn answer(name: &'static str, work: impl FnOnce(&mut Fake) -> CuResult) -> CuResult {
        with(|fake| match fake.fail {
            Some((failing, code)) if failing == name => code,
            _ => work(fake),
        })
    }

    const OK: CuResult = CuResult::SUCCESS;
    const DEVICES: c_int = 2;

    unsafe extern "C" fn get_current(context: *mut Context) -> CuResult {
        answer("get", |fake| {
            // SAFETY: the caller's local.
            unsafe { *context = ptr::without_provenance_mut(fake.stack.last().copied().unwrap_or(0)) };
            OK
        })
    }

    unsafe extern "C" fn push_current(context: Context) -> CuResult {
        answer("push", |fake| {
            fake.stack.push(context.addr());
            fake.pushes += 1;
            OK
        })
    }

    unsafe extern "C" fn pop_current(context: *mut Context) -> CuResult {
        answer("pop", |fake| match if fake.failing_pops > 0 { None } else { fake.stack.pop() } {
            None if fake.failing_pops > 0 => {
                fake.failing_pops -= 1;
                if fake.pops_all_the_same {
                    fake.stack.pop();
                }
                CuResult::ERROR_ILLEGAL_ADDRESS
            }
            Some(top) => {
                // SAFETY: the caller's local.
                unsafe { *context = ptr::without_provenance_mut(top) };
                OK
            }
            None => CuResult::ERROR_INVALID_CONTEXT,
        })
    }

    unsafe extern "C" fn device_get(device: *mut Device, ordinal: c_int) -> CuResult {
        if ordinal >= DEVICES {
            return CuResult::ERROR_INVALID_DEVICE;
        }
        answer("device", |_| {
            // SAFETY: the caller's local.
            unsafe { *device = 10 + ordinal };
            OK
        })
    }

    unsafe extern "C" fn retain(context: *mut Context, device: Device) -> CuResult {
        answer("retain", |fake| {
            fake.retained += 1;
            // SAFETY: the caller's local.
            unsafe { *context = ptr::without_provenance_mut(0x1000 + device as usize) };
            OK
        })
    }

    unsafe extern "C" fn release(_: Device) -> CuResult {
        answer("release", |fake| {
            fake.released += 1;
            OK
        })
    }

    unsafe extern "C" fn unused() -> CuResult {
        CuResult::ERROR_NOT_SUPPORTED
    }

    fn table() -> Functions {
        let lookup = |name: &CStr| {
            let function: *const c_void = match name.to_str().unwrap() {
                "cuCtxGetCurrent" => get_current as *const c_void,
                "cuCtxPushCurrent_v2" => push_current as *const c_void,
                "cuCtxPopCurrent_v2" => pop_current as *const c_void,
                "cuDeviceGet" => device_get as *const c_void,
                "cuDevicePrimaryCtxRetain" => retain as *const c_void,
                "cuDevicePrimaryCtxRelease" | "cuDevicePrimaryCtxRelease_v2" => release as *const c_void,
                _ => unused as *const c_void,
            };
            NonNull::new(function.cast_mut())
        };
        // SAFETY: the functions called here have the signatures of their namesakes; the others are not called.
        unsafe { sys::Functions::bind(&lookup) }.unwrap()
    }

    fn top() -> usize {
        with(|fake| fake.stack.last().copied().unwrap_or(0))
    }

    #[test]
    fn the_threads_own_context_comes_back() {
        let (functions, contexts) = (table(), Contexts::new(2));
        for own in [vec![], vec![7], vec![7, 8]] {
            with(|fake| fake.stack.clone_from(&own));
            for device in [0, 1] {
                let bound = contexts.bind(&functions, DeviceId(device)).unwrap();
                assert_eq!(top(), 0x100a + device as usize);
                let inner = contexts.bind(&functions, DeviceId(1 - device)).unwrap();
                assert_eq!(top(), 0x100a + 1 - device as usize);
                drop(inner);
                assert_eq!(top(), 0x100a + device as usize);
                drop(bound);
                assert_eq!(with(|fake| fake.stack.clone()), own);
            }
        }
        assert_eq!(with(|fake| fake.retained), 2, "each is retained once");
    }

    #[test]
    fn a_context_that_is_current_costs_one_look() {
        let (functions, contexts) = (table(), Contexts::new(2));
        with(|fake| fake.stack = vec![0x100a]);
        drop(contexts.bind(&functions, DeviceId(0)).unwrap());
        assert_eq!(with(|fake| (fake.pushes, fake.stack.clone())), (0, vec![0x100a]));
    }

    #[test]
    fn any_context_will_do_for_a_handle() {
        let (functions, contexts) = (table(), Contexts::new(2));
        with(|fake| fake.stack = vec![7]);
        drop(contexts.bind_any(&functions).unwrap());
        assert_eq!(with(|fake| (fake.pushes, fake.retained)), (0, 0));
        with(|fake| fake.stack.clear());
        drop(contexts.bind(&functions, DeviceId(1)).unwrap());
        let bound = contexts.bind_any(&functions).unwrap();
        assert_eq!(top(), 0x100b, "the one that is there already");
        drop(bound);
        assert_eq!(with(|fake| (fake.stack.len(), fake.retained)), (0, 1));
    }

    #[test]
    fn failures_keep_their_code_and_leave_the_thread_as_it_was() {
        let (functions, contexts) = (table(), Contexts::new(2));
        with(|fake| fake.stack = vec![7]);
        assert_eq!(contexts.bind(&functions, DeviceId(2)).err(), Some(CuResult::ERROR_INVALID_DEVICE));
        assert_eq!(contexts.bind(&functions, DeviceId(u32::MAX)).err(), Some(CuResult::ERROR_INVALID_DEVICE));
        for call in ["retain", "push"] {
            with(|fake| fake.fail = Some((call, CuResult(4321))));
            assert_eq!(contexts.bind(&functions, DeviceId(0)).err(), Some(CuResult(4321)), "{call}");
            assert_eq!(with(|fake| fake.stack.clone()), [7]);
        }
        // Not to know the thread's context is no reason to lose it.
        with(|fake| fake.fail = Some(("get", CuResult::ERROR_CONTEXT_IS_DESTROYED)));
        let bound = contexts.bind(&functions, DeviceId(0)).unwrap();
        assert_eq!(top(), 0x100a);
        drop(bound);
        assert_eq!(with(|fake| fake.stack.clone()), [7]);
    }

    #[test]
    fn a_failure_of_earlier_work_does_not_keep_the_threads_context_away() {
        let (functions, contexts) = (table(), Contexts::new(1));
        for pops_all_the_same in [false, true] {
            for own in [vec![], vec![7], vec![7, 8]] {
                with(|fake| {
                    fake.stack.clone_from(&own);
                    (fake.failing_pops, fake.pops_all_the_same) = (1, pops_all_the_same);
                });
                drop(contexts.bind(&functions, DeviceId(0)).unwrap());
                assert_eq!(with(|fake| (fake.stack.clone(), fake.failing_pops)), (own, 0), "{pops_all_the_same}");
            }
        }
    }

    #[test]
    fn a_context_that_could_not_be_retained_is_tried_again() {
        let (functions, contexts) = (table(), Contexts::new(1));
        with(|fake| fake.fail = Some(("retain", CuResult::ERROR_OUT_OF_MEMORY)));
        assert_eq!(contexts.bind(&functions, DeviceId(0)).err(), Some(CuResult::ERROR_OUT_OF_MEMORY));
        with(|fake| fake.fail = None);
        assert!(contexts.bind(&functions, DeviceId(0)).is_ok());
    }

    #[test]
    fn what_was_retained_is_released_whatever_else_fails() {
        let (functions, mut contexts) = (table(), Contexts::new(2));
        drop(contexts.bind(&functions, DeviceId(0)).unwrap());
        drop(contexts.bind(&functions, DeviceId(1)).unwrap());
        with(|fake| fake.fail = Some(("device", CuResult::ERROR_UNKNOWN)));
        contexts.release(&functions);
        assert_eq!(with(|fake| (fake.retained, fake.released)), (2, 2));
    }

    #[test]
    fn what_was_retained_is_released_once() {
        let (functions, mut contexts) = (table(), Contexts::new(2));
        drop(contexts.bind(&functions, DeviceId(1)).unwrap());
        contexts.release(&functions);
        contexts.release(&functions);
        assert_eq!(with(|fake| (fake.retained, fake.released)), (1, 1));
    }
}
