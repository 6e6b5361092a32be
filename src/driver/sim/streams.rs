//! Streams and events: what is queued, what waits for what, and when it runs.
//!
//! Every operation of a stream has a number, counted from 1, and a stream runs them in order. A *point* is such a
//! number on a stream; it is reached when the stream has completed it. An event's record is the point it was recorded
//! at, a wait is a point that an operation comes after, and the legacy stream's barrier is a set of points as well. So
//! there is one rule: an operation runs when its stream is not stalled, those before it are done, and the points it
//! comes after are reached.
//!
//! Where nothing is stalled, an operation completes inside the call that queues it.

use super::kernels::KernelCall;
use super::memory::Touch;
use super::space::Table;
use super::{SimDriver, State, undefined};
use crate::driver::{DriverResult, EventHandle, StreamFlags, StreamHandle};
use crate::error::CuResult;
use crate::sync::{MutexGuard, ThreadId, current_thread, thread_local};
use crate::units::{DeviceId, DevicePtr};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Whether this thread is running a host function, which may not call the driver.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread may call the driver.
pub(super) fn calls_permitted() -> bool {
    !IN_HOST_FUNCTION.with(Cell::get)
}

/// A stream's id, which is never used again.
pub(super) type StreamKey = u64;

/// An operation of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Point {
    stream: StreamKey,
    number: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Legacy,
    PerThread,
    Created(StreamFlags),
}

impl Kind {
    /// Whether the stream and the legacy stream wait for each other.
    fn blocks(self) -> bool {
        matches!(self, Self::PerThread | Self::Created(StreamFlags::Blocking))
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    device: usize,
    kind: Kind,
    /// Whether its handle lives. A stream without one goes when its work is done.
    alive: bool,
    stalled: bool,
    /// Whether its first operation is running outside the lock.
    running: bool,
    queued: u64,
    completed: u64,
    queue: VecDeque<Operation>,
}

#[derive(Debug)]
struct Operation {
    after: Vec<Point>,
    work: Work,
}

/// What an operation does.
pub(super) enum Work {
    /// Nothing: a place for an event, or a wait.
    Marker,
    Host(Box<dyn FnOnce() + Send>),
    Copy {
        destination: DevicePtr,
        source: DevicePtr,
        bytes: u64,
    },
    Fill {
        address: DevicePtr,
        value: u8,
        bytes: u64,
    },
    Kernel(KernelCall),
    /// An allocation in the stream's order is there from now on.
    Allocate(DevicePtr),
    /// And is gone.
    Free(DevicePtr),
}

impl Work {
    fn name(&self) -> &'static str {
        match self {
            Self::Marker => "a wait",
            Self::Host(_) => "a host function",
            Self::Copy { .. } => "cuMemcpyAsync",
            Self::Fill { .. } => "cuMemsetD8Async",
            Self::Kernel(call) => call.name(),
            Self::Allocate(_) => "cuMemAllocAsync",
            Self::Free(_) => "cuMemFreeAsync",
        }
    }

    pub(super) fn touches(&self) -> [Option<Touch>; 2] {
        match self {
            Self::Marker | Self::Host(_) | Self::Allocate(_) | Self::Free(_) => [None, None],
            Self::Copy { destination, source, bytes } => [Some(Touch::read(*source, *bytes)), Some(Touch::write(*destination, *bytes))],
            Self::Fill { address, bytes, .. } => [Some(Touch::write(*address, *bytes)), None],
            Self::Kernel(call) => call.touches(),
        }
    }

    pub(super) fn is_copy(&self) -> bool {
        matches!(self, Self::Copy { .. } | Self::Fill { .. })
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    device: usize,
    /// The last record, or `None` before the first.
    record: Option<Point>,
}

#[derive(Debug)]
pub(super) struct Queues {
    streams: HashMap<StreamKey, Stream>,
    /// Streams with operations not completed.
    busy: BTreeSet<StreamKey>,
    next_key: StreamKey,
    /// Threads that wait in `SimDriver::changed`.
    waiters: usize,
    /// Created streams, by handle.
    pub(super) handles: Table<StreamKey>,
    /// The legacy stream of each device.
    legacy: Vec<StreamKey>,
    per_thread: HashMap<(usize, ThreadId), StreamKey>,
    pub(super) events: Table<Event>,
}

impl Queues {
    pub(super) fn new(devices: usize, reuse_handles: bool) -> Self {
        let mut queues = Self {
            streams: HashMap::new(),
            busy: BTreeSet::new(),
            next_key: 1,
            waiters: 0,
            handles: Table::new(0x5600_0000_0100, reuse_handles),
            legacy: Vec::new(),
            per_thread: HashMap::new(),
            events: Table::new(0x5700_0000_0100, reuse_handles),
        };
        for device in 0..devices {
            let key = queues.add(device, Kind::Legacy);
            queues.legacy.push(key);
        }
        queues
    }

    fn add(&mut self, device: usize, kind: Kind) -> StreamKey {
        let key = self.next_key;
        self.next_key += 1;
        let stream = Stream { device, kind, alive: true, stalled: false, running: false, queued: 0, completed: 0, queue: VecDeque::new() };
        self.streams.insert(key, stream);
        key
    }

    fn reached(&self, point: Point) -> bool {
        self.streams.get(&point.stream).is_none_or(|stream| stream.completed >= point.number)
    }

    fn last(&self, key: StreamKey) -> Point {
        Point { stream: key, number: self.streams.get(&key).map_or(0, |stream| stream.queued) }
    }

    fn stream_mut(&mut self, key: StreamKey) -> &mut Stream {
        self.streams.get_mut(&key).expect("a stream stays while its handle lives or it has work")
    }

    /// What the legacy stream's barrier makes the next operation of a stream come after.
    fn barrier(&self, key: StreamKey) -> Vec<Point> {
        if self.busy.is_empty() {
            return Vec::new();
        }
        let Some(stream) = self.streams.get(&key) else { return Vec::new() };
        match stream.kind {
            Kind::Legacy => self.pending(|other| other.device == stream.device && other.kind.blocks()),
            kind if kind.blocks() => {
                let legacy = self.last(self.legacy[stream.device]);
                if self.reached(legacy) { Vec::new() } else { vec![legacy] }
            }
            _ => Vec::new(),
        }
    }

    /// The last points of the busy streams that `choose` picks.
    fn pending(&self, choose: impl Fn(&Stream) -> bool) -> Vec<Point> {
        self.busy.iter().filter(|key| self.streams.get(key).is_some_and(&choose)).map(|&key| self.last(key)).collect()
    }

    /// What must be reached for a stream to be idle. The legacy stream is idle when the blocking streams are, too.
    fn idle_points(&self, key: StreamKey) -> Vec<Point> {
        let is_legacy = self.streams.get(&key).is_some_and(|stream| stream.kind == Kind::Legacy);
        let mut points = if is_legacy { self.barrier(key) } else { Vec::new() };
        let last = self.last(key);
        if !self.reached(last) {
            points.push(last);
        }
        points
    }

    /// Takes an operation off a stream's queue if it can run.
    fn next_runnable(&mut self) -> Option<(StreamKey, usize, Work)> {
        let ready = |key: &&StreamKey| {
            let stream = &self.streams[*key];
            let first = stream.queue.front();
            !stream.stalled && !stream.running && first.is_some_and(|first| first.after.iter().all(|&point| self.reached(point)))
        };
        let key = self.busy.iter().find(ready).copied()?;
        let stream = self.stream_mut(key);
        let operation = stream.queue.pop_front()?;
        stream.running = true;
        Some((key, stream.device, operation.work))
    }

    fn complete(&mut self, key: StreamKey) {
        let stream = self.stream_mut(key);
        stream.running = false;
        stream.completed += 1;
        if stream.completed == stream.queued {
            self.busy.remove(&key);
        }
    }

    fn forget_if_done(&mut self, key: StreamKey) {
        if !self.streams[&key].alive && !self.busy.contains(&key) {
            self.streams.remove(&key);
        }
    }
}

impl State {
    /// The stream that a handle means on a device.
    pub(super) fn stream(&mut self, device: DeviceId, handle: StreamHandle) -> DriverResult<StreamKey> {
        let device = self.device(device)?;
        let queues = &mut self.queues;
        match handle {
            StreamHandle::DEFAULT | StreamHandle::LEGACY => Ok(queues.legacy[device]),
            StreamHandle::PER_THREAD => {
                let thread = current_thread().id();
                if let Some(&key) = queues.per_thread.get(&(device, thread)) {
                    return Ok(key);
                }
                let key = queues.add(device, Kind::PerThread);
                queues.per_thread.insert((device, thread), key);
                Ok(key)
            }
            StreamHandle(value) => {
                let Some(&key) = queues.handles.get(value) else {
                    undefined(format_args!("a call with {handle:?}, which is not live"));
                };
                if queues.streams[&key].device == device { Ok(key) } else { Err(CuResult::ERROR_INVALID_HANDLE) }
            }
        }
    }

    fn event(&self, event: EventHandle) -> DriverResult<Event> {
        if event.0 == 0 {
            return Err(CuResult::ERROR_INVALID_HANDLE);
        }
        let Some(&event) = self.queues.events.get(event.0) else {
            undefined(format_args!("a call with {event:?}, which is not live"));
        };
        self.sound(event.device)?;
        Ok(event)
    }

    pub(super) fn stream_create(&mut self, device: DeviceId, flags: StreamFlags) -> DriverResult<StreamHandle> {
        let device = self.device(device)?;
        let key = self.queues.add(device, Kind::Created(flags));
        Ok(StreamHandle(self.queues.handles.insert(key)))
    }

    pub(super) fn stream_destroy(&mut self, handle: StreamHandle) -> DriverResult<()> {
        if handle.is_default() {
            return Err(CuResult::ERROR_INVALID_HANDLE);
        }
        let Some(&key) = self.queues.handles.get(handle.0) else {
            undefined(format_args!("cuStreamDestroy of {handle:?}, which is not live"));
        };
        self.sound(self.queues.streams[&key].device)?;
        self.queues.handles.remove(handle.0);
        self.queues.stream_mut(key).alive = false;
        self.queues.forget_if_done(key);
        Ok(())
    }

    pub(super) fn event_create(&mut self, device: DeviceId) -> DriverResult<EventHandle> {
        let device = self.device(device)?;
        Ok(EventHandle(self.queues.events.insert(Event { device, record: None })))
    }

    pub(super) fn event_destroy(&mut self, event: EventHandle) -> DriverResult<()> {
        self.event(event)?;
        self.queues.events.remove(event.0);
        Ok(())
    }

    pub(super) fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let event = self.event(event)?;
        Ok(event.record.is_none_or(|point| self.queues.reached(point)))
    }

    pub(super) fn stream_query(&mut self, device: DeviceId, stream: StreamHandle) -> DriverResult<bool> {
        let key = self.stream(device, stream)?;
        Ok(self.queues.idle_points(key).is_empty())
    }

    /// Ends the test where queued work touches memory that a call is about to take from under it: on a GPU anything may
    /// happen.
    ///
    /// # Panics
    /// In that case.
    pub(super) fn refuse_in_use(&self, call: &str, start: u64, bytes: u64) {
        for key in &self.queues.busy {
            let stream = &self.queues.streams[key];
            for operation in &stream.queue {
                for touch in operation.work.touches().into_iter().flatten() {
                    if touch.overlaps(start, bytes) {
                        undefined(format_args!(
                            "{call} of {bytes} bytes at {start:#x} while {} queued on stream {key} of device {} touches {} bytes at {:#x}",
                            operation.work.name(),
                            stream.device,
                            touch.bytes,
                            touch.start,
                        ));
                    }
                }
            }
        }
    }

    /// Runs what runs on the device. After an error nothing runs there any more.
    fn execute(&mut self, device: usize, work: &Work) {
        if self.devices[device].sticky.is_some() {
            return;
        }
        match work {
            Work::Allocate(address) => return self.ordered_begins(*address),
            Work::Free(address) => return self.ordered_ends(*address),
            _ => {}
        }
        let touches = work.touches().into_iter().flatten();
        let allowed = { touches }.all(|touch| self.touchable(device, touch, work.is_copy()) && !self.is_coming(touch.start));
        if !allowed {
            self.devices[device].sticky = Some(CuResult::ERROR_ILLEGAL_ADDRESS);
            return;
        }
        let Some(backing) = &mut self.backing else { return };
        match work {
            Work::Marker | Work::Host(_) | Work::Allocate(_) | Work::Free(_) => {}
            Work::Copy { destination, source, bytes } => backing.copy(destination.address(), source.address(), *bytes),
            Work::Fill { address, value, bytes } => backing.fill(address.address(), *value, *bytes),
            Work::Kernel(call) => call.run(backing),
        }
    }
}

impl SimDriver {
    /// Queues an operation, and runs what can run.
    pub(super) fn submit<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        key: StreamKey,
        mut after: Vec<Point>,
        work: Work,
    ) -> MutexGuard<'a, State> {
        let queues = &mut state.queues;
        after.extend(queues.barrier(key));
        after.retain(|&point| !queues.reached(point));
        let stream = queues.stream_mut(key);
        stream.queued += 1;
        stream.queue.push_back(Operation { after, work });
        queues.busy.insert(key);
        self.pump(state)
    }

    /// Runs operations until none can run. Host functions run without the lock.
    fn pump<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let mut progress = false;
        while let Some((key, device, work)) = state.queues.next_runnable() {
            progress = true;
            let mut panic = None;
            match work {
                Work::Host(function) if state.devices[device].sticky.is_none() => {
                    drop(state);
                    let outer = IN_HOST_FUNCTION.with(|inside| inside.replace(true));
                    panic = catch_unwind(AssertUnwindSafe(function)).err();
                    IN_HOST_FUNCTION.with(|inside| inside.set(outer));
                    state = self.state.lock();
                }
                work => state.execute(device, &work),
            }
            state.queues.complete(key);
            state.queues.forget_if_done(key);
            if let Some(panic) = panic {
                self.changed.notify_all();
                drop(state);
                resume_unwind(panic);
            }
        }
        // A notice is a system call, so it is left out where nobody waits.
        if progress && state.queues.waiters > 0 {
            self.changed.notify_all();
        }
        state
    }

    /// Waits until all points are reached, or the device's context is broken.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        device: usize,
        points: &[Point],
    ) -> DriverResult<MutexGuard<'a, State>> {
        loop {
            state.sound(device)?;
            if points.iter().all(|&point| state.queues.reached(point)) {
                return Ok(state);
            }
            state.queues.waiters += 1;
            state = self.changed.wait(state);
            state.queues.waiters -= 1;
        }
    }

    /// Waits for everything queued in a device's context.
    pub(super) fn wait_context<'a>(&'a self, state: MutexGuard<'a, State>, device: usize) -> DriverResult<MutexGuard<'a, State>> {
        let points = state.queues.pending(|stream| stream.device == device);
        self.wait(state, device, &points)
    }

    pub(super) fn synchronize_stream(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        let points = state.queues.idle_points(key);
        self.wait(state, device.0 as usize, &points).map(drop)
    }

    pub(super) fn wait_event(&self, device: DeviceId, stream: StreamHandle, event: EventHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        // Waiting for what is done is nothing, on the legacy stream too: it makes no barrier.
        if let Some(point) = state.event(event)?.record.filter(|&point| !state.queues.reached(point)) {
            drop(self.submit(state, key, vec![point], Work::Marker));
        }
        Ok(())
    }

    pub(super) fn record_event(&self, device: DeviceId, event: EventHandle, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        if state.event(event)?.device != device.0 as usize {
            return Err(CuResult::ERROR_INVALID_HANDLE);
        }
        // The point is set before the operation runs: running it may drop the lock.
        let mut point = state.queues.last(key);
        point.number += 1;
        if let Some(event) = state.queues.events.get_mut(event.0) {
            event.record = Some(point);
        }
        drop(self.submit(state, key, Vec::new(), Work::Marker));
        Ok(())
    }

    pub(super) fn synchronize_event(&self, event: EventHandle) -> DriverResult<()> {
        let state = self.state.lock();
        let event = state.event(event)?;
        let points: Vec<Point> = event.record.into_iter().collect();
        self.wait(state, event.device, &points).map(drop)
    }

    /// Queues work that touches memory. Whether it may is seen when it runs.
    pub(super) fn work(&self, device: DeviceId, stream: StreamHandle, work: Work) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        let index = device.0 as usize;
        if work.is_copy() {
            // The driver looks up the addresses of a copy or a fill before it queues it. What it does not know it takes
            // for memory of the host.
            for touch in work.touches().into_iter().flatten() {
                if touch.bytes == 0 {
                    return Ok(());
                }
                let unknown = matches!(work, Work::Copy { .. }) && !state.is_memory(touch.start);
                if unknown {
                    undefined(format_args!("{} of {} bytes at {:#x}, where nothing is", work.name(), touch.bytes, touch.start));
                }
                if !state.touchable(index, touch, true) {
                    return Err(CuResult::ERROR_INVALID_VALUE);
                }
            }
        }
        drop(self.submit(state, key, Vec::new(), work));
        Ok(())
    }

    /// From now on nothing queued on the stream runs, until [`SimDriver::resume`].
    ///
    /// # Errors
    /// The code that a call with this stream would return.
    pub fn stall(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        state.queues.stream_mut(key).stalled = true;
        Ok(())
    }

    /// Lets a stalled stream go on: runs what is queued on it, and whatever waited for that.
    ///
    /// # Errors
    /// The code that a call with this stream would return.
    pub fn resume(&self, device: DeviceId, stream: StreamHandle) -> DriverResult<()> {
        let mut state = self.state.lock();
        let key = state.stream(device, stream)?;
        state.queues.stream_mut(key).stalled = false;
        drop(self.pump(state));
        Ok(())
    }

    /// [Resumes](SimDriver::resume) every stream, those whose handle was destroyed too.
    pub fn resume_all(&self) {
        let mut state = self.state.lock();
        state.queues.streams.values_mut().for_each(|stream| stream.stalled = false);
        drop(self.pump(state));
    }
}

impl SimDriver {
    /// A copy from the host: it waits for what is queued before it on the legacy stream.
    pub(super) fn copy_in(&self, device: DeviceId, destination: DevicePtr, source: &[u8]) -> DriverResult<()> {
        let touch = Touch::write(destination, source.len() as u64);
        let mut state = self.copy_now(device, touch)?;
        if let Some(backing) = &mut state.backing {
            backing.write(destination.address(), source);
        }
        Ok(())
    }

    /// A copy to the host, likewise.
    pub(super) fn copy_out(&self, device: DeviceId, destination: &mut [u8], source: DevicePtr) -> DriverResult<()> {
        let touch = Touch::read(source, destination.len() as u64);
        let mut state = self.copy_now(device, touch)?;
        let backing = state.backing.as_mut().ok_or(CuResult::ERROR_NOT_SUPPORTED)?;
        backing.read(destination, source.address());
        Ok(())
    }

    fn copy_now(&self, device: DeviceId, touch: Touch) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        let key = state.stream(device, StreamHandle::LEGACY)?;
        let points = state.queues.idle_points(key);
        let index = device.0 as usize;
        let state = self.wait(state, index, &points)?;
        if state.touchable(index, touch, true) { Ok(state) } else { Err(CuResult::ERROR_INVALID_VALUE) }
    }
}
