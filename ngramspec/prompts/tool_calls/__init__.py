"""Tool calls: in which forms models write them, how they are recognised in a stream, how templates that know no tools are told of them."""
