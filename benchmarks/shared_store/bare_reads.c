/* Reads ranges of RADOS objects into one memory, so many under way: what librados itself can do.

   bare_reads CONF POOL NAMESPACE DEPTH LIST: LIST has a line for each range, "name offset size".
   The answer to each line of the input is a pass over all: seconds, and of those of processors. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

typedef void *handle;
int rados_create(handle *, const char *);
int rados_conf_read_file(handle, const char *);
int rados_connect(handle);
int rados_ioctx_create(handle, const char *, handle *);
void rados_ioctx_set_namespace(handle, const char *);
int rados_aio_create_completion2(void *, void *, handle *);
int rados_aio_read(handle, const char *, handle, char *, size_t, uint64_t);
int rados_aio_wait_for_complete(handle);
int rados_aio_get_return_value(handle);
void rados_aio_release(handle);

struct range { char name[128]; uint64_t offset, size; };

static void check(int code, const char *what) {
    if (code < 0) { fprintf(stderr, "%s: %d\n", what, code); exit(1); }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double processors(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

int main(int count, char **words) {
    handle cluster, pool;
    if (count != 6) return 2;
    check(rados_create(&cluster, "admin"), "create");
    check(rados_conf_read_file(cluster, words[1]), "conf");
    check(rados_connect(cluster), "connect");
    check(rados_ioctx_create(cluster, words[2], &pool), "pool");
    rados_ioctx_set_namespace(pool, words[3]);
    long depth = atol(words[4]), ranges = 0, room = 0;
    struct range *list = NULL, one;
    FILE *file = fopen(words[5], "r");
    size_t total = 0;
    while (file && fscanf(file, "%127s %lu %lu", one.name, &one.offset, &one.size) == 3) {
        if (ranges == room) list = realloc(list, (room = 2 * room + 64) * sizeof one);
        list[ranges++] = one;
        total += one.size;
    }
    char *memory = malloc(total), line[16];
    handle *under_way = calloc(depth, sizeof(handle));
    while (fgets(line, sizeof line, stdin)) {
        double wall = now(), processor = processors();
        char *landing = memory;
        for (long n = 0; n < ranges + depth; n++) {
            handle *slot = &under_way[n % depth];
            if (*slot) {
                rados_aio_wait_for_complete(*slot);
                check(rados_aio_get_return_value(*slot), "read");
                rados_aio_release(*slot);
                *slot = NULL;
            }
            if (n >= ranges) continue;
            check(rados_aio_create_completion2(NULL, NULL, slot), "completion");
            check(rados_aio_read(pool, list[n].name, *slot, landing, list[n].size, list[n].offset),
                  "aio_read");
            landing += list[n].size;
        }
        printf("%f %f\n", now() - wall, processors() - processor);
        fflush(stdout);
    }
    return 0;
}
