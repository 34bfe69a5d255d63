"""What crosses a wire between ObjectCache's processes: layouts, descriptors, messages, errors."""
