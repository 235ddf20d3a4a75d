// Tensors of (batch, row, head, column) as the copy engine takes them.
#pragma once

#include "core/config.h"
#include "core/types.h"
#include "runtime/device.h"

namespace fovea::runtime {

// Extents of (batch, row, head) in memory.
struct RowExtents {
  core::int64 of[3];
};

// Contiguous rows of 16-bit elements, every other step a positive multiple of 16 bytes. Dimensions
// of extent 1 have no step.
bool suits_copy_engine(const core::View& view, const RowExtents& extents, core::int64 columns);

// A map over (column, row, head, batch), in boxes of 64 columns x box_rows with the 128-byte
// swizzle.
core::TensorMap encode_rows(Device& device, const core::View& view, const RowExtents& extents,
                            core::int64 columns, core::int32 box_rows);

}  // namespace fovea::runtime
