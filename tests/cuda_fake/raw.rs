//! The fake library by itself, through C's signatures: what the other tests stand on.

use crate::library;
use crate::support::{Fake, in_children};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::{mem, ptr, thread};
use vrampool::driver::sim::{BUILTIN_MODULE, pattern};
use vrampool::error::CuResult;

const OK: c_int = 0;
const INVALID_VALUE: c_int = 1;
const NOT_INITIALIZED: c_int = 3;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const DESTROYED: c_int = 709;

/// Calls a function by name with arguments of C's types; it returns a code.
macro_rules! cu {
    ($fake:expr, $name:ident($($value:expr => $type:ty),* $(,)?)) => {
        // SAFETY: the types are those of cuda.h, and pointers lead to values of the test's own.
        unsafe { $fake.function::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name))($($value),*) }
    };
}

fn initialized() -> Fake {
    let fake = Fake::of_child();
    assert_eq!(cu!(fake, cuInit(0 => c_uint)), OK);
    fake
}

/// Retains a device's context and makes it current.
fn with_context(device: c_int) -> Fake {
    let fake = initialized();
    let context = retain(&fake, device);
    assert_eq!(cu!(fake, cuCtxSetCurrent(context => u64)), OK);
    fake
}

fn retain(fake: &Fake, device: c_int) -> u64 {
    let mut context = 0_u64;
    assert_eq!(cu!(fake, cuDevicePrimaryCtxRetain(&raw mut context => *mut u64, device => c_int)), OK);
    context
}

fn current(fake: &Fake) -> u64 {
    let mut context = u64::MAX;
    assert_eq!(cu!(fake, cuCtxGetCurrent(&raw mut context => *mut u64)), OK);
    context
}

fn allocate(fake: &Fake, bytes: usize) -> Result<u64, c_int> {
    let mut address = 0_u64;
    match cu!(fake, cuMemAlloc_v2(&raw mut address => *mut u64, bytes => usize)) {
        OK => Ok(address),
        code => Err(code),
    }
}

#[test]
fn before_cuinit_only_questions_about_the_library_are_answered() {
    in_children(&["version=12080"], || {
        let fake = Fake::of_child();
        let (mut number, mut value, mut text) = (0 as c_int, 0_u64, ptr::null::<c_char>());
        assert_eq!(cu!(fake, cuDriverGetVersion(&raw mut number => *mut c_int)), OK);
        assert_eq!(number, 12_080);
        assert_eq!(cu!(fake, cuGetErrorName(700 => c_int, &raw mut text => *mut *const c_char)), OK);
        // SAFETY: a name that a zero byte ends, of the library's.
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(cu!(fake, cuDeviceGetCount(&raw mut number => *mut c_int)), NOT_INITIALIZED);
        assert_eq!(cu!(fake, cuCtxGetCurrent(&raw mut value => *mut u64)), NOT_INITIALIZED);
        assert_eq!(cu!(fake, cuMemFree_v2(0 => u64)), NOT_INITIALIZED);
        assert_eq!(cu!(fake, cuMemRelease(0 => u64)), NOT_INITIALIZED);
        assert_eq!(cu!(fake, cuDevicePrimaryCtxRelease_v2(0 => c_int)), NOT_INITIALIZED);
        assert_eq!(cu!(fake, cuInit(1 => c_uint)), INVALID_VALUE);
        assert_eq!(cu!(fake, cuInit(0 => c_uint)), OK);
        assert_eq!(cu!(fake, cuDeviceGetCount(&raw mut number => *mut c_int)), OK);
        assert_eq!(number, 1);
        assert_eq!((fake.calls("cuInit"), fake.calls("cuDeviceGetCount"), fake.calls("*")), (2, 2, 10));
    });
}

#[test]
fn no_context_is_an_error_where_one_is_needed_and_nowhere_else() {
    in_children(&[""], || {
        let fake = with_context(0);
        let (mut stream, mut event, memory) = (0_u64, 0_u64, allocate(&fake, 4096).unwrap());
        assert_eq!(cu!(fake, cuStreamCreate(&raw mut stream => *mut u64, 1 => c_uint)), OK);
        assert_eq!(cu!(fake, cuEventCreate(&raw mut event => *mut u64, 2 => c_uint)), OK);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut value, mut size, mut status) = (0_u64, 0_usize, 0 as c_int);
                assert_eq!(current(&fake), 0);
                assert_eq!(allocate(&fake, 4096), Err(INVALID_CONTEXT));
                assert_eq!(cu!(fake, cuCtxSynchronize()), INVALID_CONTEXT);
                assert_eq!(cu!(fake, cuMemGetInfo_v2(&raw mut size => *mut usize, &raw mut size => *mut usize)), INVALID_CONTEXT);
                assert_eq!(cu!(fake, cuStreamCreate(&raw mut value => *mut u64, 0 => c_uint)), INVALID_CONTEXT);
                assert_eq!(cu!(fake, cuEventCreate(&raw mut value => *mut u64, 0 => c_uint)), INVALID_CONTEXT);
                for default in [0, 1, 2] {
                    assert_eq!(cu!(fake, cuStreamQuery(default => u64)), INVALID_CONTEXT);
                    assert_eq!(cu!(fake, cuEventRecord(event => u64, default => u64)), INVALID_CONTEXT);
                }
                assert_eq!(cu!(fake, cuCtxPushCurrent_v2(0 => u64)), INVALID_VALUE);
                assert_eq!(cu!(fake, cuCtxPopCurrent_v2(&raw mut value => *mut u64)), INVALID_CONTEXT);
                assert_eq!(cu!(fake, cuCtxSetCurrent(0 => u64)), OK);
                // What is named says which context.
                assert_eq!(cu!(fake, cuStreamQuery(stream => u64)), OK);
                assert_eq!(cu!(fake, cuStreamIsCapturing(stream => u64, &raw mut status => *mut c_int)), OK);
                assert_eq!(cu!(fake, cuStreamGetId(stream => u64, &raw mut value => *mut u64)), OK);
                assert_eq!(cu!(fake, cuEventRecord(event => u64, stream => u64)), OK);
                assert_eq!(cu!(fake, cuEventSynchronize(event => u64)), OK);
                assert_eq!(cu!(fake, cuMemsetD8Async(memory => u64, 7 => u8, 16 => usize, stream => u64)), OK);
                assert_eq!(cu!(fake, cuEventDestroy_v2(event => u64)), OK);
                assert_eq!(cu!(fake, cuStreamDestroy_v2(stream => u64)), OK);
                assert_eq!(cu!(fake, cuMemFree_v2(memory => u64)), OK);
                assert_eq!(cu!(fake, cuMemFree_v2(memory => u64)), INVALID_VALUE);
                assert_eq!(cu!(fake, cuMemFree_v2(0 => u64)), OK);
                assert_eq!(
                    cu!(fake, cuMemAddressReserve(&raw mut value => *mut u64, 2 << 20 => usize, 0 => usize, 0 => u64, 0 => u64)),
                    OK
                );
                assert_eq!(cu!(fake, cuMemAddressFree(value => u64, 2 << 20 => usize)), OK);
            });
        });
        assert_eq!(fake.outstanding(), "primary context of device 0: 1 references\n");
    });
}

#[test]
fn contexts_are_stacked_for_each_thread_and_counted() {
    in_children(&["devices=2"], || {
        let fake = initialized();
        let (first, second) = (retain(&fake, 0), retain(&fake, 1));
        assert_eq!((retain(&fake, 0), fake.references(0)), (first, 2));
        assert_ne!(first, second);
        assert_eq!(cu!(fake, cuCtxPushCurrent_v2(first => u64)), OK);
        assert_eq!(cu!(fake, cuCtxPushCurrent_v2(second => u64)), OK);
        assert_eq!((current(&fake), fake.context()), (second, (second, 2)));
        let mut popped = 0_u64;
        assert_eq!(cu!(fake, cuCtxSetCurrent(first => u64)), OK);
        assert_eq!(cu!(fake, cuCtxPopCurrent_v2(&raw mut popped => *mut u64)), OK);
        assert_eq!((popped, fake.context()), (first, (first, 1)));
        assert_eq!(cu!(fake, cuCtxPushCurrent_v2(first + 1 => u64)), INVALID_CONTEXT);
        // The last release takes everything in the context along, and no more can be released.
        let memory = allocate(&fake, 1 << 20).unwrap();
        assert_eq!(cu!(fake, cuDevicePrimaryCtxRelease_v2(0 => c_int)), OK);
        assert!(allocate(&fake, 1).is_ok());
        assert_eq!(cu!(fake, cuDevicePrimaryCtxRelease(0 => c_int)), OK);
        assert_eq!(cu!(fake, cuDevicePrimaryCtxRelease_v2(0 => c_int)), INVALID_CONTEXT);
        assert_eq!((allocate(&fake, 1), current(&fake)), (Err(DESTROYED), first));
        assert_eq!(cu!(fake, cuMemFree_v2(memory => u64)), INVALID_VALUE);
        let left = fake.outstanding();
        assert!(left.contains("2 allocations were left in the context of device 0"), "{left}");
        assert!(left.contains("device 1: 1 references") && !left.contains("of device 0:"), "{left}");
    });
}

#[test]
fn kernels_and_copies_do_on_bytes_what_they_should() {
    in_children(&[""], || {
        let fake = with_context(0);
        let image = CString::new(BUILTIN_MODULE).unwrap();
        let (mut module, mut fill) = (0_u64, 0_u64);
        let garbage = c"garbage";
        assert_eq!(cu!(fake, cuModuleLoadData(&raw mut module => *mut u64, garbage.as_ptr() => *const c_char)), 200);
        assert_eq!(cu!(fake, cuModuleLoadData(&raw mut module => *mut u64, image.as_ptr() => *const c_char)), OK);
        let mut find =
            |name: &CStr| cu!(fake, cuModuleGetFunction(&raw mut fill => *mut u64, module => u64, name.as_ptr() => *const c_char));
        assert_eq!((find(c"nothing"), find(c"fill")), (NOT_FOUND, OK));
        let (mut at, mut words, mut seed) = (allocate(&fake, 4096).unwrap(), 1024_u64, 7_u32);
        let mut arguments = [(&raw mut at).cast::<c_void>(), (&raw mut words).cast(), (&raw mut seed).cast()];
        let mut launch = |function: u64, threads: c_uint| {
            cu!(fake, cuLaunchKernel(
                function => u64, 1 => c_uint, 1 => c_uint, 1 => c_uint, threads => c_uint, 1 => c_uint, 1 => c_uint, 0 => c_uint, 0 => u64,
                arguments.as_mut_ptr() => *mut *mut c_void, ptr::null_mut() => *mut *mut c_void
            ))
        };
        assert_eq!((launch(fill, 0), launch(module, 32), launch(fill, 32)), (INVALID_VALUE, INVALID_HANDLE, OK));
        let mut read = [0_u32; 4];
        let bytes = size_of_val(&read);
        assert_eq!(cu!(fake, cuMemcpyDtoH_v2(read.as_mut_ptr().cast() => *mut c_void, at => u64, bytes => usize)), OK);
        assert_eq!(read, [0, 1, 2, 3].map(|index| pattern(7, index)));
        let written = [1_u32, 2, 3, 4];
        assert_eq!(cu!(fake, cuMemcpyHtoD_v2(at => u64, written.as_ptr().cast() => *const c_void, bytes => usize)), OK);
        assert_eq!(cu!(fake, cuMemcpyAsync(at + 64 => u64, at => u64, bytes => usize, 0 => u64)), OK);
        assert_eq!(cu!(fake, cuMemcpyDtoH_v2(read.as_mut_ptr().cast() => *mut c_void, at + 64 => u64, bytes => usize)), OK);
        assert_eq!(read, written);
        extern "C" fn count(to: *mut c_void) {
            // SAFETY: the number below, which nobody else touches until the stream is synchronized.
            unsafe { *to.cast::<u32>() += 1 };
        }
        let mut ran = 0_u32;
        type HostFunction = extern "C" fn(*mut c_void);
        assert_eq!(cu!(fake, cuLaunchHostFunc(0 => u64, count => HostFunction, (&raw mut ran).cast() => *mut c_void)), OK);
        assert_eq!((cu!(fake, cuStreamSynchronize(0 => u64)), ran), (OK, 1));
        assert_eq!(cu!(fake, cuModuleUnload(module => u64)), OK);
        assert_eq!(cu!(fake, cuModuleUnload(module => u64)), INVALID_HANDLE);
    });
}

/// `CUmemAllocationProp` and `CUmemAccessDesc`, word by word as cuda.h lays them out.
#[test]
fn memory_is_mapped_through_the_structs_of_cuda() {
    in_children(&["granularity=64KiB"], || {
        let fake = initialized();
        let mut properties = [0_u32; 8];
        (properties[0], properties[2], properties[3]) = (1, 1, 0);
        let (mut size, mut at, mut handle) = (0_usize, 0_u64, 0_u64);
        let mut granularity = |properties: &[u32; 8]| cu!(fake, cuMemGetAllocationGranularity(&raw mut size => *mut usize, properties.as_ptr() => *const u32, 0 => c_int));
        let mut wrong = properties;
        wrong[3] = 1;
        assert_eq!((granularity(&wrong), granularity(&[0; 8]), granularity(&properties)), (101, INVALID_VALUE, OK));
        assert_eq!(size, 64 << 10);
        assert_eq!(cu!(fake, cuMemAddressReserve(&raw mut at => *mut u64, 4 * size => usize, 0 => usize, 0 => u64, 0 => u64)), OK);
        let mut create =
            |bytes: usize| cu!(fake, cuMemCreate(&raw mut handle => *mut u64, bytes => usize, properties.as_ptr() => *const u32, 0 => u64));
        assert_eq!((create(size - 1), create(2 << 30), create(size)), (INVALID_VALUE, 2, OK));
        assert_eq!(cu!(fake, cuMemMap(at => u64, size => usize, 0 => usize, handle => u64, 0 => u64)), OK);
        let access = [1_u32, 0, 3];
        assert_eq!(cu!(fake, cuMemSetAccess(at => u64, size => usize, access.as_ptr() => *const u32, 1 => usize)), OK);
        assert!(fake.outstanding().contains("reservation"), "{}", fake.outstanding());
        assert_eq!(cu!(fake, cuMemUnmap(at => u64, size => usize)), OK);
        assert_eq!(cu!(fake, cuMemRelease(handle => u64)), OK);
        assert_eq!(cu!(fake, cuMemAddressFree(at => u64, 4 * size => usize)), OK);
        assert_eq!(fake.outstanding(), "");
    });
}

#[test]
fn functions_are_found_by_base_name_and_version() {
    in_children(&["version=11040,hide=cuMemMap"], || {
        let fake = Fake::of_child();
        let find = |name: &str, version: c_int| {
            let (mut found, mut status) = (ptr::null_mut::<c_void>(), -1 as c_int);
            let name = CString::new(name).unwrap();
            let code = cu!(fake, cuGetProcAddress_v2(
                name.as_ptr() => *const c_char, &raw mut found => *mut *mut c_void, version => c_int, 0 => u64, &raw mut status => *mut c_int
            ));
            assert_eq!(found.is_null(), code != OK);
            (code, status, found as usize)
        };
        let address = |name: &str| {
            // SAFETY: the address alone is looked at.
            unsafe { fake.function::<*const c_void>(name) as usize }
        };
        assert_eq!(find("cuMemAlloc", 11_000), (OK, 0, address("cuMemAlloc_v2")));
        assert_eq!(find("cuMemCreate", 10_020), (OK, 0, address("cuMemCreate")));
        assert_eq!(find("cuDevicePrimaryCtxRelease", 10_020), (OK, 0, address("cuDevicePrimaryCtxRelease")));
        assert_eq!(find("cuDevicePrimaryCtxRelease", 11_000), (OK, 0, address("cuDevicePrimaryCtxRelease_v2")));
        for (name, status) in [("cuMemAlloc_v2", 1), ("cuNothing", 1), ("cuStreamGetId", 1), ("cuMemMap", 1)] {
            assert_eq!(find(name, 12_000), (NOT_FOUND, status, 0), "{name}");
        }
        assert_eq!(find("cuMemCreate", 10_010), (NOT_FOUND, 2, 0));
        // SAFETY: the type that the control has.
        let hide = unsafe { fake.function::<extern "C" fn(*const c_char, c_int) -> c_int>("fake_hide") };
        assert_eq!((hide(c"cuMemCreate".as_ptr(), 1), find("cuMemCreate", 12_000).0), (0, NOT_FOUND));
        assert_eq!((hide(c"cuMemCreate".as_ptr(), 0), find("cuMemCreate", 12_000).0), (0, OK));
    });
}

#[test]
fn faults_strike_when_planned() {
    in_children(&[""], || {
        let fake = with_context(0);
        fake.fail("cuMemAlloc_v2", 1, 12_345);
        assert!(allocate(&fake, 1).is_ok());
        assert_eq!(allocate(&fake, 1), Err(12_345));
        assert!(allocate(&fake, 1).is_ok());
        assert_eq!(fake.clear(), 0);
        fake.fail("*", -1, 999);
        assert_eq!((allocate(&fake, 1), cu!(fake, cuCtxSynchronize())), (Err(999), 999));
        assert_eq!((fake.clear(), cu!(fake, cuCtxSynchronize())), (1, OK));
        fake.poison(0, 719);
        assert_eq!(allocate(&fake, 1), Err(719));
    });
}

#[test]
fn a_library_is_really_reduced() {
    let fake = Fake::open(library::full());
    let symbols = fake.symbols();
    let (old, new): (Vec<_>, Vec<_>) = symbols.iter().partition(|(_, since)| *since <= 10_010);
    assert!(old.len() > 40 && new.len() >= 12, "{symbols:?}");
    let names: Vec<&str> = new.iter().map(|(name, _)| name.as_str()).collect();
    let renamed = library::without(&names, "fake-cuda-renamed");
    for path in [library::reduced(), &renamed] {
        // SAFETY: as in `Fake::open`.
        let library = unsafe { libloading::os::unix::Library::new(path) }.unwrap();
        for (name, since) in &symbols {
            // SAFETY: the symbol is not used.
            let found = unsafe { library.get::<*const c_void>(name) }.is_ok();
            assert_eq!(found, *since <= 10_010, "{name} in {}", path.display());
        }
        mem::forget(library);
    }
}

#[test]
fn every_code_has_its_name() {
    let fake = Fake::open(library::full());
    for &code in CuResult::NAMED {
        let mut text = ptr::null::<c_char>();
        assert_eq!(cu!(fake, cuGetErrorName(code.0 => c_int, &raw mut text => *mut *const c_char)), OK);
        // SAFETY: a name that a zero byte ends, of the library's.
        assert_eq!(unsafe { CStr::from_ptr(text) }.to_str().ok(), code.name());
    }
    let mut text = ptr::null::<c_char>();
    assert_eq!(cu!(fake, cuGetErrorString(12_345 => c_int, &raw mut text => *mut *const c_char)), INVALID_VALUE);
    assert!(text.is_null());
}
