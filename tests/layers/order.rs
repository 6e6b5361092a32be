//! The order of layers.

/// The layers, lowest first, each with its top-level modules. Modules of one layer may use each other.
const LAYERS: &[(&str, &[&str])] = &[
    ("base", &["error", "units", "sync"]),
    ("driver", &["driver"]),
    ("arena", &["arena"]),
    ("buddy", &["buddy"]),
    ("slab", &["slab"]),
    ("stream", &["stream"]),
    ("cache", &["cache"]),
    ("pool", &["pool"]),
    ("outside", &["trace", "replay", "testing", "capi", "cli", "config"]),
];

/// A layer: its place in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Layer(usize);

impl Layer {
    /// The layer of a top-level module, or `None` for a module that no layer lists.
    pub(crate) fn of(module: &str) -> Option<Self> {
        LAYERS.iter().position(|(_, modules)| modules.contains(&module)).map(Self)
    }

    pub(crate) fn name(self) -> &'static str {
        LAYERS[self.0].0
    }
}
