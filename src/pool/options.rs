//! The options of a pool that text can name, and their text.

use crate::driver::{HandleTypes, MemoryKind};
use crate::error::{Error, Result};
use crate::units::{MIN_ALIGNMENT, duration_text, parse_bytes, parse_duration};
use std::fmt;
use std::time::Duration;

const DEFAULT_SLACK: f64 = 0.02;
/// With this much, nothing but a limit ever has memory moved.
const MAX_SLACK: f64 = 1000.0;

/// See [`PoolBuilder`](super::PoolBuilder). As text: `key=value` pairs with commas between, for what is not as by default.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Options {
    pub(super) kind: MemoryKind,
    pub(super) initial: u64,
    pub(super) maximum: Option<u64>,
    pub(super) growth: u64,
    pub(super) alignment: u64,
    pub(super) rdma: bool,
    pub(super) shareable: HandleTypes,
    pub(super) no_vmm: bool,
    pub(super) slack: f64,
    pub(super) decay: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            kind: MemoryKind::default(),
            initial: 0,
            maximum: None,
            growth: 0,
            alignment: MIN_ALIGNMENT,
            rdma: false,
            shareable: HandleTypes::NONE,
            no_vmm: false,
            slack: DEFAULT_SLACK,
            decay: None,
        }
    }
}

impl Options {
    /// Every option by its name, with its value as text; `None` where no text stands for it.
    fn pairs(&self) -> [(&'static str, Option<String>); 10] {
        [
            ("kind", Some(self.kind.to_string())),
            ("initial", Some(self.initial.to_string())),
            ("maximum", self.maximum.map(|maximum| maximum.to_string())),
            ("growth", Some(self.growth.to_string())),
            ("alignment", Some(self.alignment.to_string())),
            ("rdma", Some(self.rdma.to_string())),
            ("shareable", Some(self.shareable.to_string())),
            ("no_vmm", Some(self.no_vmm.to_string())),
            ("slack", Some(self.slack.to_string())),
            ("decay", self.decay.map(duration_text)),
        ]
    }

    /// Sets one option.
    ///
    /// # Errors
    /// An invalid argument: an unknown key, or a value that cannot be read. Nothing is set then.
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let truth = || value.parse().map_err(|_| format!("'{value}' is not true or false"));
        match key {
            "kind" => value.parse().map(|kind| self.kind = kind),
            "initial" => parse_bytes(value).map(|bytes| self.initial = bytes),
            "maximum" => parse_bytes(value).map(|bytes| self.maximum = Some(bytes)),
            "growth" => parse_bytes(value).map(|bytes| self.growth = bytes),
            "alignment" => parse_bytes(value).map(|bytes| self.alignment = bytes),
            "rdma" => truth().map(|rdma| self.rdma = rdma),
            "shareable" => value.parse().map(|types| self.shareable = types),
            "no_vmm" => truth().map(|no_vmm| self.no_vmm = no_vmm),
            "decay" => parse_duration(value).map(|period| self.decay = Some(period)),
            "slack" => value.parse().map(|share| self.slack = share).map_err(|_| format!("'{value}' is not a number such as 0.02")),
            _ => {
                let known = self.pairs().map(|(key, _)| key).join(", ");
                return Err(Error::invalid_argument(format!("option '{key}' is not known ({known})")));
            }
        }
        .map_err(|why| Error::invalid_argument(format!("option '{key}': {why}")))
    }

    /// Sets options from text. See [`PoolBuilder::configure`](super::PoolBuilder::configure).
    ///
    /// # Errors
    /// An invalid argument. Some options may be set then.
    pub(super) fn configure(&mut self, text: &str) -> Result<()> {
        let mut seen = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let malformed = || Error::invalid_argument(format!("option '{pair}' is not of the form key=value"));
            let (key, value) = pair.split_once('=').ok_or_else(malformed)?;
            let (key, value) = (key.trim(), value.trim());
            if seen.contains(&key) {
                return Err(Error::invalid_argument(format!("option '{key}' is set twice")));
            }
            seen.push(key);
            self.set(key, value)?;
        }
        Ok(())
    }

    /// Checks what no device can make right.
    ///
    /// # Errors
    /// An invalid argument.
    pub(super) fn check(&self) -> Result<()> {
        let for_handles = if self.rdma {
            Some("rdma")
        } else if !self.shareable.is_empty() {
            Some("shareable")
        } else {
            None
        };
        if let Some(option) = for_handles
            && (self.no_vmm || self.kind != MemoryKind::Device)
        {
            let other = if self.no_vmm { "no_vmm".to_owned() } else { format!("kind={}", self.kind) };
            return Err(Error::invalid_argument(format!(
                "{option} is for memory from virtual memory management, which {other} has none of"
            )));
        }
        if ![MIN_ALIGNMENT, 2 * MIN_ALIGNMENT].contains(&self.alignment) {
            return Err(Error::invalid_argument(format!("a pool's alignment is 256 or 512 bytes, not {}", self.alignment)));
        }
        if !(0.0..=MAX_SLACK).contains(&self.slack) {
            return Err(Error::invalid_argument(format!("a slack of {} is not a share from 0 to {MAX_SLACK}", self.slack)));
        }
        if self.decay == Some(Duration::ZERO) {
            return Err(Error::invalid_argument("memory cannot decay after no time; Pool::trim gives it back at once"));
        }
        Ok(())
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.pairs().into_iter().zip(Self::default().pairs()).filter(|(own, default)| own != default);
        let texts: Vec<String> = own.filter_map(|((key, value), _)| Some(format!("{key}={}", value?))).collect();
        f.write_str(&texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use std::collections::BTreeSet;

    #[test]
    fn every_option_is_the_same_by_the_builder_and_by_text_and_round_trips() {
        let all = HandleTypes::FILE_DESCRIPTOR | HandleTypes::FABRIC;
        let cases = [
            ("kind=pinned", Pool::builder().kind(MemoryKind::Pinned)),
            ("kind=managed", Pool::builder().kind(MemoryKind::Managed)),
            ("initial=1048576", Pool::builder().initial(1 << 20)),
            ("initial=18446744073709551615", Pool::builder().initial(u64::MAX)),
            ("maximum=0", Pool::builder().maximum(0)),
            ("maximum=2097153", Pool::builder().maximum((2 << 20) + 1)),
            ("growth=1", Pool::builder().growth(1)),
            ("alignment=512", Pool::builder().alignment(512)),
            ("rdma=true", Pool::builder().rdma(true)),
            ("shareable=fd", Pool::builder().shareable(HandleTypes::FILE_DESCRIPTOR)),
            ("shareable=fabric", Pool::builder().shareable(HandleTypes::FABRIC)),
            ("shareable=fd+fabric", Pool::builder().shareable(all)),
            ("no_vmm=true", Pool::builder().no_vmm(true)),
            ("slack=0.4", Pool::builder().slack(0.4)),
            ("slack=0", Pool::builder().slack(0.0)),
            ("decay=10s", Pool::builder().decay(Duration::from_secs(10))),
            ("decay=1500us", Pool::builder().decay(Duration::from_micros(1500))),
            ("decay=18446744073709551615999999999ns", Pool::builder().decay(Duration::MAX)),
            ("", Pool::builder()),
            (
                "initial=2097152,maximum=8388608,growth=4194304,alignment=512,rdma=true,shareable=fd+fabric",
                Pool::builder().shareable(all).rdma(true).initial(2 << 20).maximum(8 << 20).growth(4 << 20).alignment(512),
            ),
        ];
        let texts = cases.each_ref().map(|(text, _)| *text);
        for (text, built) in cases {
            let read = Pool::builder().configure(text).unwrap();
            assert_eq!(read.options, built.options, "{text}");
            assert_eq!(built.config(), text);
            assert_eq!(Pool::builder().configure(&built.config()).unwrap().options, built.options);
            // What is set shows to whoever prints the builder.
            assert!(text.is_empty() || format!("{built:?}") != format!("{:?}", Pool::builder()), "{text}");
        }
        // No option is left out.
        let keys = |text: &'static str| text.split(',').filter_map(|pair| pair.split_once('=')).map(|(key, _)| key);
        let covered: BTreeSet<&str> = texts.into_iter().flat_map(keys).collect();
        assert_eq!(covered, Options::default().pairs().into_iter().map(|(key, _)| key).collect());
    }

    #[test]
    fn text_for_the_defaults_is_the_defaults() {
        for text in [
            "kind=device",
            "initial=0",
            "growth=0",
            "alignment=256",
            "rdma=false",
            "shareable=none",
            "no_vmm=false",
            "slack=0.02",
            "",
            ",,",
        ] {
            let builder = Pool::builder().configure(text).unwrap();
            assert_eq!((builder.config(), &builder.options), (String::new(), &Options::default()), "{text}");
        }
        let builder = Pool::builder().configure(" kind=pinned, initial=1MiB,maximum=2GiB ,growth = 4096,").unwrap();
        assert_eq!(builder.config(), "kind=pinned,initial=1048576,maximum=2147483648,growth=4096");
    }

    #[test]
    fn unusable_text_is_refused_with_the_reason() {
        for (text, reason) in [
            ("maximun=1", "'maximun' is not known (kind, initial,"),
            ("maximum", "key=value"),
            ("maximum=", "'maximum'"),
            ("maximum=none", "'maximum'"),
            ("maximum=1GB", "unit"),
            ("initial=-1", "'initial'"),
            ("kind=host", "option 'kind': 'host' is not device, pinned or managed"),
            ("growth=1,growth=1", "'growth' is set twice"),
            ("rdma", "key=value"),
            ("rdma=", "option 'rdma': '' is not true or false"),
            ("rdma=1", "option 'rdma': '1' is not true or false"),
            ("rdma=True", "'True'"),
            ("rdma=true,rdma=true", "'rdma' is set twice"),
            ("no_vmm=yes", "option 'no_vmm': 'yes' is not true or false"),
            ("no-vmm=true", "'no-vmm' is not known"),
            ("shareable=", "option 'shareable': '' is none of"),
            ("shareable=win32", "option 'shareable': 'win32' is none of"),
            ("shareable=fd+", "option 'shareable': '' is none of"),
            ("shareable=fd+fd", "option 'shareable': 'fd' comes twice"),
            ("shareable=9", "'9' is none of"),
            ("slack=", "option 'slack': '' is not a number"),
            ("slack=much", "'much'"),
            ("decay=10", "option 'decay': time '10'"),
            ("decay=none", "option 'decay'"),
        ] {
            let error = Pool::builder().configure(text).unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(reason), "{text}: {error}");
        }
    }
}
