"""What is measured again after a study: one of its candidates (`tune rerun`), or its decision (`tune validate`)."""
