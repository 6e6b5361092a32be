//! The command-line program: `vrampool replay`, `vrampool min-capacity`, `vrampool bench`, `vrampool info`.

mod args;
mod bench;
mod capacity;
mod device;
mod format;
mod info;
mod output;
mod replay;
mod table;

use args::{Arguments, Command};
use clap::Parser;
use std::process::ExitCode;

/// Why the program ends without having done what it was asked.
enum Failure {
    /// The arguments or a file are of no use: status 2.
    Usage(String),
    /// The work failed: status 1.
    Work(String),
}

impl From<vrampool::Error> for Failure {
    fn from(error: vrampool::Error) -> Self {
        let unusable = error.is_invalid_argument() || error.is_unavailable();
        let message = error.to_string();
        if unusable { Self::Usage(message) } else { Self::Work(message) }
    }
}

fn main() -> ExitCode {
    // Ends the program with status 2, or with 0 after --help.
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Command::Replay(arguments) => replay::run(&arguments),
        Command::MinCapacity(arguments) => capacity::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
    };
    match done {
        Ok(status) => status,
        Err(Failure::Usage(message)) => {
            output::complain(&message);
            ExitCode::from(2)
        }
        Err(Failure::Work(message)) => {
            output::complain(&message);
            ExitCode::from(1)
        }
    }
}
