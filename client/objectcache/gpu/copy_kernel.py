"""The kernel that copies the pieces of a table: between places of a device, or a device and mapped
host memory.

Few blocks of threads, so that most of the device goes on with what it computes: 16 of 512 threads
that each have 64 bytes on the way are more than a PCIe link's delay needs.
"""

NAME = "copy_pieces"
BLOCKS = 16
THREADS = 512
SOURCE = r"""
struct Piece { const char* source; char* target; unsigned long long size; };

extern "C" __global__ void copy_pieces(const Piece* pieces, unsigned int count)
{
    for (unsigned int index = blockIdx.x; index < count; index += gridDim.x) {
        const Piece piece = pieces[index];
        const unsigned long long all =
            (unsigned long long)piece.source | (unsigned long long)piece.target | piece.size;
        if (all & 15) {
            for (unsigned long long i = threadIdx.x; i < piece.size; i += blockDim.x)
                piece.target[i] = piece.source[i];
            continue;
        }
        const uint4* source = (const uint4*)piece.source;
        uint4* target = (uint4*)piece.target;
        const unsigned long long words = piece.size / 16;
        const unsigned long long step = blockDim.x;
        unsigned long long i = threadIdx.x;
        for (; i + 3 * step < words; i += 4 * step) {
            const uint4 a = source[i], b = source[i + step];
            const uint4 c = source[i + 2 * step], d = source[i + 3 * step];
            target[i] = a;
            target[i + step] = b;
            target[i + 2 * step] = c;
            target[i + 3 * step] = d;
        }
        for (; i < words; i += step)
            target[i] = source[i];
    }
}
"""
