//! The driver's result codes.

use std::fmt;

/// A result code of the CUDA driver (`CUresult`): a transparent integer, so that a code this crate has no name for is a
/// value like any other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct CuResult(pub i32);

macro_rules! codes {
    ($($name:ident = $value:literal;)*) => {
        impl CuResult {
            $(
                #[doc = concat!("`CUDA_", stringify!($name), "` (", stringify!($value), ").")]
                pub const $name: Self = Self($value);
            )*

            /// Every code that has a name here, in ascending order.
            pub const NAMED: &'static [Self] = &[$(Self::$name),*];

            /// The driver's name of the code, or `None` for a code that has no name here.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some(concat!("CUDA_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0;
    ERROR_INVALID_VALUE = 1;
    ERROR_OUT_OF_MEMORY = 2;
    ERROR_NOT_INITIALIZED = 3;
    ERROR_DEINITIALIZED = 4;
    ERROR_STUB_LIBRARY = 34;
    ERROR_DEVICE_UNAVAILABLE = 46;
    ERROR_NO_DEVICE = 100;
    ERROR_INVALID_DEVICE = 101;
    ERROR_INVALID_IMAGE = 200;
    ERROR_INVALID_CONTEXT = 201;
    ERROR_MAP_FAILED = 205;
    ERROR_UNMAP_FAILED = 206;
    ERROR_ALREADY_MAPPED = 208;
    ERROR_NOT_MAPPED = 211;
    ERROR_ECC_UNCORRECTABLE = 214;
    ERROR_PEER_ACCESS_UNSUPPORTED = 217;
    ERROR_INVALID_PTX = 218;
    ERROR_OPERATING_SYSTEM = 304;
    ERROR_INVALID_HANDLE = 400;
    ERROR_ILLEGAL_STATE = 401;
    ERROR_NOT_FOUND = 500;
    ERROR_NOT_READY = 600;
    ERROR_ILLEGAL_ADDRESS = 700;
    ERROR_LAUNCH_OUT_OF_RESOURCES = 701;
    ERROR_LAUNCH_TIMEOUT = 702;
    ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;
    ERROR_PEER_ACCESS_NOT_ENABLED = 705;
    ERROR_CONTEXT_IS_DESTROYED = 709;
    ERROR_LAUNCH_FAILED = 719;
    ERROR_NOT_PERMITTED = 800;
    ERROR_NOT_SUPPORTED = 801;
    ERROR_SYSTEM_NOT_READY = 802;
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900;
    ERROR_STREAM_CAPTURE_INVALIDATED = 901;
    ERROR_STREAM_CAPTURE_MERGE = 902;
    ERROR_STREAM_CAPTURE_UNMATCHED = 903;
    ERROR_STREAM_CAPTURE_UNJOINED = 904;
    ERROR_STREAM_CAPTURE_ISOLATION = 905;
    ERROR_STREAM_CAPTURE_IMPLICIT = 906;
    ERROR_CAPTURED_EVENT = 907;
    ERROR_STREAM_CAPTURE_WRONG_THREAD = 908;
    ERROR_UNKNOWN = 999;
}

impl CuResult {
    /// Whether the code reports success.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "CUresult {}", self.0),
        }
    }
}

impl fmt::Debug for CuResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CuResult {}
