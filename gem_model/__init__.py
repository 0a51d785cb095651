"""GEM: a generative ads recommendation model built on the public names of `mxfp8`."""
