#!/usr/bin/env python3
"""Cuts a recorded trace short, and shrinks its sizes.

    make.py SOURCE.csv.gz TARGET.csv.gz [--events N] [--divide D]

Keeps the first N events (all without the option) and divides each size by D, rounded up and at least 1. The other columns
stay as they were recorded: addresses of a shrunken trace are names of blocks, not places. The same source gives the same
bytes on every machine with the same zlib.
"""
import argparse
import csv
import gzip
import io


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--events", type=int)
    parser.add_argument("--divide", type=int, default=1)
    options = parser.parse_args()

    text = io.StringIO()
    with gzip.open(options.source, "rt", newline="") as source:
        rows = csv.DictReader(source)
        writer = csv.DictWriter(text, rows.fieldnames, lineterminator="\n")
        writer.writeheader()
        for index, row in enumerate(rows):
            if index == options.events:
                break
            row["Size"] = max(1, -(-int(row["Size"]) // options.divide))
            writer.writerow(row)
    with open(options.target, "wb") as target:
        # Neither a name nor a time in the header, so that the bytes depend on the content alone.
        with gzip.GzipFile("", "wb", 9, target, mtime=0) as compressed:
            compressed.write(text.getvalue().encode())


if __name__ == "__main__":
    main()
