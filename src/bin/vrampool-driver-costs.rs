//! What the driver's virtual memory management costs: each call idle and under load, what it does to another thread's work,
//! and how many handles there can be.
//!
//! Tables in Markdown, or with `--json` one JSON document. On the simulated device the times are its model's, on one clock
//! that counts the calls of all threads.

use clap::Parser;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vrampool::driver::kernels::BUILTIN_MODULE;
use vrampool::driver::{
    AccessDescriptor, AccessFlags, DeviceChoice, Driver, FunctionHandle, HandleProperties, KernelArgument, LaunchConfig, MemoryKind,
    PhysicalHandle, StreamFlags, StreamHandle,
};
use vrampool::error::CuResult;
use vrampool::units::{DeviceId, DevicePtr, GIB, MIB};

/// Measures what the driver's virtual memory management costs.
#[derive(Parser)]
struct Arguments {
    /// The device: sim, or cuda:N
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// How often each call is timed
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

type Outcome<T> = Result<T, CuResult>;

/// Handles and neighbours of the second table have this size, and so have the many handles of the third.
const SMALL: u64 = 2 * MIB;
const SIZES_MIB: [u64; 6] = [2, 4, 8, 16, 32, 64];
/// What the busy device fills again and again: some milliseconds at a time.
const FILLED: u64 = 4 * GIB;
/// How many samples of a thread's work are queued before it waits for them, so that no queue is ever full.
const QUEUED: u32 = 64;
/// How many handles the means of the third table are over.
const ENDS: usize = 1000;

/// Times in microseconds.
struct Samples {
    what: String,
    load: &'static str,
    times: Vec<f64>,
}

impl Samples {
    fn new(what: impl Into<String>, load: &'static str) -> Self {
        Self { what: what.into(), load, times: Vec::new() }
    }

    /// The median, the 99th percentile and the maximum.
    fn figures(&self) -> [f64; 3] {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied().unwrap_or(0.0);
        [at(50), at(99), at(100)]
    }

    fn json(&self) -> Value {
        let [p50, p99, max] = self.figures();
        json!({ "what": self.what, "gpu": self.load, "samples": self.times.len(), "p50_us": p50, "p99_us": p99, "max_us": max })
    }
}

fn print_samples(title: &str, rows: &[Samples]) {
    println!("\n{title}\n\n| what | GPU | p50 µs | p99 µs | max µs |\n|---|---|--:|--:|--:|");
    for row in rows {
        let [p50, p99, max] = row.figures();
        println!("| {} | {} | {p50:.1} | {p99:.1} | {max:.1} |", row.what, row.load);
    }
}

struct Bench {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    fill: FunctionHandle,
    repeats: u32,
}

impl Bench {
    /// What a call took in microseconds, and what it returned.
    fn timed<T>(&self, call: impl FnOnce() -> Outcome<T>) -> Outcome<(f64, T)> {
        let (model, start) = (self.driver.modelled_ns(), Instant::now());
        let value = call()?;
        let wall = start.elapsed().as_nanos() as f64;
        let modelled = self.driver.modelled_ns().zip(model).map(|(after, before)| (after - before) as f64);
        Ok((modelled.unwrap_or(wall) / 1000.0, value))
    }

    fn sample<T>(&self, into: &mut Samples, call: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let (time, value) = self.timed(call)?;
        into.times.push(time);
        Ok(value)
    }

    fn create(&self, bytes: u64) -> Outcome<PhysicalHandle> {
        self.driver.mem_create(bytes, &HandleProperties::on(self.device))
    }

    fn access(&self, address: DevicePtr, bytes: u64) -> Outcome<()> {
        self.driver.mem_set_access(address, bytes, &[AccessDescriptor { device: self.device, flags: AccessFlags::ReadWrite }])
    }

    fn launch_fill(&self, stream: StreamHandle, address: DevicePtr, bytes: u64, blocks: u32) -> Outcome<()> {
        let shape = LaunchConfig { grid: [blocks, 1, 1], block: [256, 1, 1], shared_bytes: 0 };
        let arguments = [KernelArgument::Pointer(address), KernelArgument::U64(bytes / 4), KernelArgument::U32(7)];
        self.driver.launch_kernel(self.device, self.fill, shape, stream, &arguments)
    }

    /// Measures with the device idle, then while one stream fills a large buffer without end.
    fn idle_and_busy(&self, measure: impl Fn(&'static str) -> Outcome<Vec<Samples>>) -> Outcome<Vec<Samples>> {
        self.driver.context_synchronize(self.device)?;
        let mut rows = measure("idle")?;
        let buffer = self.driver.mem_alloc(self.device, MemoryKind::Device, FILLED)?;
        let stream = self.driver.stream_create(self.device, StreamFlags::NonBlocking)?;
        rows.extend(self.beside(|stop| self.keep_busy(stop, stream, buffer), || measure("busy"))?);
        self.driver.stream_destroy(stream)?;
        self.driver.mem_free(self.device, MemoryKind::Device, buffer)?;
        Ok(rows)
    }

    /// Keeps four fills queued until told to stop.
    fn keep_busy(&self, stop: &AtomicBool, stream: StreamHandle, buffer: DevicePtr) -> Outcome<()> {
        let events = (0..4).map(|_| self.driver.event_create(self.device)).collect::<Outcome<Vec<_>>>()?;
        while !stop.load(Ordering::Relaxed) {
            for &event in &events {
                if self.driver.event_query(event)? {
                    self.launch_fill(stream, buffer, FILLED, 2048)?;
                    self.driver.event_record(self.device, event, stream)?;
                }
            }
            thread::sleep(Duration::from_micros(300));
        }
        self.driver.stream_synchronize(self.device, stream)?;
        events.into_iter().try_for_each(|event| self.driver.event_destroy(event))
    }

    /// Measures while another thread works, which is told when to stop.
    fn beside<T>(&self, work: impl FnOnce(&AtomicBool) -> Outcome<()> + Send, measure: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let worker = scope.spawn(|| work(&stop));
            thread::sleep(Duration::from_millis(10));
            let measured = measure();
            stop.store(true, Ordering::Relaxed);
            let worked = worker.join().unwrap_or(Err(CuResult::ERROR_UNKNOWN));
            measured.and_then(|value| worked.map(|()| value))
        })
    }

    /// The calls of a handle's life, and of its move to another address.
    fn calls(&self, load: &'static str) -> Outcome<Vec<Samples>> {
        let driver = &*self.driver;
        let mut rows = Vec::new();
        for size in SIZES_MIB {
            let bytes = size * MIB;
            let range = driver.mem_address_reserve(2 * bytes, 0)?;
            let other = range.offset(bytes);
            let [mut create, mut map, mut access, mut unmap, mut release, mut moved] =
                ["create", "map", "set_access", "unmap", "release", "move"].map(|call| Samples::new(format!("{call} {size} MiB"), load));
            for _ in 0..self.repeats {
                let handle = self.sample(&mut create, || self.create(bytes))?;
                self.sample(&mut map, || driver.mem_map(range, bytes, 0, handle))?;
                self.sample(&mut access, || self.access(range, bytes))?;
                self.sample(&mut moved, || {
                    driver.mem_unmap(range, bytes)?;
                    driver.mem_map(other, bytes, 0, handle)?;
                    self.access(other, bytes)
                })?;
                self.sample(&mut unmap, || driver.mem_unmap(other, bytes))?;
                self.sample(&mut release, || driver.mem_release(handle))?;
            }
            driver.mem_address_free(range, 2 * bytes)?;
            rows.extend([create, map, access, unmap, release, moved]);
        }
        if load == "idle" {
            let mut synchronize = Samples::new("context_synchronize", load);
            for _ in 0..self.repeats {
                self.sample(&mut synchronize, || driver.context_synchronize(self.device))?;
            }
            rows.push(synchronize);
        }
        Ok(rows)
    }

    /// How long a thread's work waits in the driver alone, and beside each kind of neighbour.
    fn neighbours(&self, load: &'static str) -> Outcome<Vec<Samples>> {
        let driver = &*self.driver;
        let mut rows = self.work("alone", load)?;
        rows.extend(self.beside(|stop| self.move_pages(stop), || self.work("beside moves", load))?);
        let handles = |stop: &AtomicBool| {
            while !stop.load(Ordering::Relaxed) {
                driver.mem_release(self.create(SMALL)?)?;
            }
            Ok(())
        };
        rows.extend(self.beside(handles, || self.work("beside create and release", load))?);
        let plain = |stop: &AtomicBool| {
            while !stop.load(Ordering::Relaxed) {
                let address = driver.mem_alloc(self.device, MemoryKind::Device, SMALL)?;
                driver.mem_free(self.device, MemoryKind::Device, address)?;
            }
            Ok(())
        };
        rows.extend(self.beside(plain, || self.work("beside cuMemAlloc and cuMemFree", load))?);
        Ok(rows)
    }

    /// Moves one handle to and fro.
    fn move_pages(&self, stop: &AtomicBool) -> Outcome<()> {
        let driver = &*self.driver;
        let range = driver.mem_address_reserve(2 * SMALL, 0)?;
        let handle = self.create(SMALL)?;
        let (mut here, mut there) = (range, range.offset(SMALL));
        driver.mem_map(here, SMALL, 0, handle)?;
        self.access(here, SMALL)?;
        while !stop.load(Ordering::Relaxed) {
            driver.mem_unmap(here, SMALL)?;
            driver.mem_map(there, SMALL, 0, handle)?;
            self.access(there, SMALL)?;
            std::mem::swap(&mut here, &mut there);
        }
        driver.mem_unmap(here, SMALL)?;
        driver.mem_release(handle)?;
        driver.mem_address_free(range, 2 * SMALL)
    }

    /// Small launches, memsets and event records on a stream of their own.
    fn work(&self, beside: &str, load: &'static str) -> Outcome<Vec<Samples>> {
        let (driver, device) = (&*self.driver, self.device);
        let stream = driver.stream_create(device, StreamFlags::NonBlocking)?;
        let buffer = driver.mem_alloc(device, MemoryKind::Device, SMALL)?;
        let event = driver.event_create(device)?;
        let [mut launch, mut memset, mut record] =
            ["launch", "memset", "event record"].map(|call| Samples::new(format!("{call} {beside}"), load));
        for round in 0..self.repeats * 4 {
            self.sample(&mut launch, || self.launch_fill(stream, buffer, 4096, 1))?;
            self.sample(&mut memset, || driver.memset_d8_async(device, buffer, 0, 4096, stream))?;
            self.sample(&mut record, || driver.event_record(device, event, stream))?;
            if round % QUEUED == 0 {
                driver.stream_synchronize(device, stream)?;
            }
        }
        driver.stream_synchronize(device, stream)?;
        driver.event_destroy(event)?;
        driver.mem_free(device, MemoryKind::Device, buffer)?;
        driver.stream_destroy(stream)?;
        Ok(vec![launch, memset, record])
    }

    /// Makes and maps small handles until the driver refuses one, and gives them all back.
    fn many(&self) -> Outcome<Value> {
        let driver = &*self.driver;
        // Twice the memory, so that it is that which ends.
        let reserved = 2 * driver.memory_info(self.device)?.total_bytes.next_multiple_of(SMALL);
        let range = driver.mem_address_reserve(reserved, 0)?;
        let mut times = ["create", "map", "set_access", "unmap", "release"].map(|call| Samples::new(call, "idle"));
        let [create, map, access, unmap, release] = &mut times;
        let mut mapped = Vec::new();
        let refusal = loop {
            let address = range.offset(mapped.len() as u64 * SMALL);
            let handle = match self.sample(create, || self.create(SMALL)) {
                Ok(handle) => handle,
                Err(code) => break code,
            };
            mapped.push((address, handle));
            self.sample(map, || driver.mem_map(address, SMALL, 0, handle))?;
            self.sample(access, || self.access(address, SMALL))?;
        };
        let free = driver.memory_info(self.device)?.free_bytes;
        let large = self.create(GIB);
        if let Ok(handle) = large {
            driver.mem_release(handle)?;
        }
        for &(address, handle) in &mapped {
            self.sample(unmap, || driver.mem_unmap(address, SMALL))?;
            self.sample(release, || driver.mem_release(handle))?;
        }
        driver.mem_address_free(range, reserved)?;
        let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len().max(1) as f64;
        let ends = times.iter().map(|samples| {
            let of = &samples.times;
            let few = of.len().min(ENDS);
            json!({ "call": samples.what, "first_us": mean(&of[..few]), "last_us": mean(&of[of.len() - few..]) })
        });
        Ok(json!({
            "handles": mapped.len(),
            "refused_with": refusal.to_string(),
            "free_mib": free / MIB,
            "then_1_gib": large.map_or_else(|code| code.to_string(), |_| "made".to_owned()),
            "means": ends.collect::<Vec<_>>(),
        }))
    }
}

fn print_many(many: &Value) {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    println!("\nMapped handles of 2 MiB: {}, then {}; {} MiB free", many["handles"], text(&many["refused_with"]), many["free_mib"]);
    println!(
        "by cuMemGetInfo; a handle of 1 GiB after that: {}. Mean times, of the first and the last {ENDS}:\n",
        text(&many["then_1_gib"])
    );
    println!("| call | first µs | last µs |\n|---|--:|--:|");
    for row in many["means"].as_array().into_iter().flatten() {
        let us = |key: &str| row[key].as_f64().unwrap_or(0.0);
        println!("| {} | {:.1} | {:.1} |", text(&row["call"]), us("first_us"), us("last_us"));
    }
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let device = arguments.device.open().map_err(|error| error.to_string())?;
    let properties = device.properties().map_err(|error| error.to_string())?;
    let (driver, id) = (device.driver().clone(), device.id());
    let refused = |code: CuResult| format!("the driver answered {code}");
    let image = format!("{BUILTIN_MODULE}\0");
    let module = driver.module_load(id, image.as_bytes()).map_err(refused)?;
    let fill = driver.module_function(module, "fill").map_err(refused)?;
    let modelled = driver.modelled_ns().is_some();
    let bench = Bench { driver, device: id, fill, repeats: arguments.repeats };
    let calls = bench.idle_and_busy(|load| bench.calls(load)).map_err(refused)?;
    let neighbours = bench.idle_and_busy(|load| bench.neighbours(load)).map_err(refused)?;
    let many = bench.many().map_err(refused)?;
    bench.driver.module_unload(id, module).map_err(refused)?;
    if arguments.json {
        let rows = |samples: &[Samples]| samples.iter().map(Samples::json).collect::<Vec<_>>();
        let name = &properties.name;
        println!(
            "{}",
            json!({ "device": name, "modelled": modelled, "calls": rows(&calls), "neighbours": rows(&neighbours), "many": many })
        );
        return Ok(());
    }
    println!("{}{}", properties.name, if modelled { ": times of the model, on one clock for all threads" } else { "" });
    print_samples("A handle's calls; a move is unmap, map and set_access", &calls);
    print_samples("Another thread's work, with handles of 2 MiB", &neighbours);
    print_many(&many);
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match measure(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("driver-costs: {error}");
            ExitCode::FAILURE
        }
    }
}
