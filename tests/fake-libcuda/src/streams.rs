//! Streams and events.

use crate::entry::{Out, exports, put};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use vrampool::driver::{CaptureMode, CaptureStatus, Driver, EventHandle, StreamFlags, StreamHandle};
use vrampool::error::CuResult;

/// A host function and what it is called with.
struct HostFunction {
    function: extern "C" fn(*mut c_void),
    argument: *mut c_void,
}

// SAFETY: the driver calls host functions from a thread of its own; who passes one has seen to that (cuLaunchHostFunc).
unsafe impl Send for HostFunction {}

impl HostFunction {
    fn call(self) {
        (self.function)(self.argument);
    }
}

/// A yes or no that is given as a code.
fn done(is_done: bool) -> Result<(), CuResult> {
    if is_done { Ok(()) } else { Err(CuResult::ERROR_NOT_READY) }
}

exports! {
    #[unsafe(no_mangle)]
    2000 init cuStreamCreate(stream: Out<'_, u64>, flags: c_uint) |fake| {
        let device = fake.current()?;
        let stream = stream.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let flags = match flags {
            0 => StreamFlags::Blocking,
            1 => StreamFlags::NonBlocking,
            _ => return Err(CuResult::ERROR_INVALID_VALUE),
        };
        let made = fake.sim.stream_create(device, flags)?;
        fake.tables().streams.insert(made.0, device);
        stream.write(made.0);
        Ok(())
    }

    #[unsafe(no_mangle)]
    4000 init cuStreamDestroy_v2(stream: u64) |fake| {
        let device = fake.tables().streams.remove(&stream);
        let destroyed = fake.sim.stream_destroy(StreamHandle(stream));
        if let (Err(_), Some(device)) = (destroyed, device) {
            fake.tables().streams.insert(stream, device);
        }
        destroyed
    }

    #[unsafe(no_mangle)]
    2000 init cuStreamQuery(stream: u64) |fake| {
        let stream = StreamHandle(stream);
        done(fake.sim.stream_query(fake.device_of_stream(stream)?, stream)?)
    }

    #[unsafe(no_mangle)]
    2000 init cuStreamSynchronize(stream: u64) |fake| {
        let stream = StreamHandle(stream);
        fake.sim.stream_synchronize(fake.device_of_stream(stream)?, stream)
    }

    #[unsafe(no_mangle)]
    3020 init cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) |fake| {
        if flags > 1 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let stream = StreamHandle(stream);
        fake.sim.stream_wait_event(fake.device_of_stream(stream)?, stream, EventHandle(event))
    }

    #[unsafe(no_mangle)]
    10000 init cuStreamIsCapturing(stream: u64, status: Out<'_, c_int>) |fake| {
        let stream = StreamHandle(stream);
        put(status, match fake.sim.stream_capture_status(fake.device_of_stream(stream)?, stream)? {
            CaptureStatus::None => 0,
            CaptureStatus::Active => 1,
            CaptureStatus::Invalidated => 2,
        })
    }

    #[cfg_attr(not(feature = "reduced"), unsafe(no_mangle))]
    12000 init cuStreamGetId(stream: u64, id: Out<'_, c_ulonglong>) |fake| {
        let stream = StreamHandle(stream);
        put(id, fake.sim.stream_id(fake.device_of_stream(stream)?, stream)?)
    }

    #[unsafe(no_mangle)]
    10010 init cuThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) |fake| {
        let mode = mode.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        let next = usize::try_from(*mode).ok().and_then(|mode| modes.get(mode)).ok_or(CuResult::ERROR_INVALID_VALUE)?;
        let before = fake.sim.thread_exchange_capture_mode(*next)?;
        *mode = modes.iter().position(|&known| known == before).unwrap_or_default() as c_int;
        Ok(())
    }

    #[unsafe(no_mangle)]
    10000 init cuLaunchHostFunc(stream: u64, function: Option<extern "C" fn(*mut c_void)>, argument: *mut c_void) |fake| {
        let stream = StreamHandle(stream);
        let device = fake.device_of_stream(stream)?;
        let function = HostFunction { function: function.ok_or(CuResult::ERROR_INVALID_VALUE)?, argument };
        fake.sim.launch_host_function(device, stream, Box::new(move || function.call()))
    }

    #[unsafe(no_mangle)]
    2000 init cuEventCreate(event: Out<'_, u64>, flags: c_uint) |fake| {
        let device = fake.current()?;
        let event = event.ok_or(CuResult::ERROR_INVALID_VALUE)?;
        // An event between processes may not have timing.
        if flags > 7 || flags & 6 == 4 {
            return Err(CuResult::ERROR_INVALID_VALUE);
        }
        let made = fake.sim.event_create(device)?;
        fake.tables().events.insert(made.0, device);
        event.write(made.0);
        Ok(())
    }

    #[unsafe(no_mangle)]
    4000 init cuEventDestroy_v2(event: u64) |fake| {
        let device = fake.tables().events.remove(&event);
        let destroyed = fake.sim.event_destroy(EventHandle(event));
        if let (Err(_), Some(device)) = (destroyed, device) {
            fake.tables().events.insert(event, device);
        }
        destroyed
    }

    #[unsafe(no_mangle)]
    2000 init cuEventRecord(event: u64, stream: u64) |fake| {
        let stream = StreamHandle(stream);
        fake.sim.event_record(fake.device_of_stream(stream)?, EventHandle(event), stream)
    }

    #[unsafe(no_mangle)]
    2000 init cuEventQuery(event: u64) |fake| {
        done(fake.sim.event_query(EventHandle(event))?)
    }

    #[unsafe(no_mangle)]
    2000 init cuEventSynchronize(event: u64) |fake| {
        fake.sim.event_synchronize(EventHandle(event))
    }
}
