"""One body of properties for every implementation of MXFP8, and the certificate. See docs/validation.md."""
