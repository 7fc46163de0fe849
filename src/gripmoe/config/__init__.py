"""Typed configuration, errors that name file, key and remedy, code fingerprint, provenance. Never imports torch."""
