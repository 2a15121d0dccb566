/* Four costs of the daemons that tests need not pay. Preloaded; all else of them stays as it is.
 *
 * Proof of work, in place of librandomx: on a regtest chain each hash is good enough, yet RandomX takes
 * some 0.15 s of CPU for a block, and the tests mine thousands. The hash is FNV-1a, for it must differ by
 * block and be the same in each process.
 *
 * Keys of certificates: monero-wallet-rpc makes an RSA key of 4096 bits for each wallet that it makes or
 * opens, also with TLS disabled. One of 2048 bits is the shortest that OpenSSL takes by default, and
 * three shorter primes are found sooner than two.
 *
 * The speed of the CPU's counter: before main begins, each Monero daemon reads the clock for a second,
 * to learn how many ticks there are to a nanosecond. Here each of these looks is a second later.
 *
 * Waits for acknowledgements: monero-wallet-rpc sends the head and the body of a request to its node apart.
 * Nagle's algorithm keeps the body back until the node's kernel acknowledges the head, some 40 ms later. An
 * operator takes that away by a route with "quickack".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

static char stand_in; /* for a cache, a dataset and a machine: they are handed about, never read */

int randomx_get_flags(void) { return 0; }
void *randomx_alloc_cache(int flags) { (void)flags; return &stand_in; }
void randomx_init_cache(void *cache, const void *key, size_t size) { (void)cache, (void)key, (void)size; }
void randomx_release_cache(void *cache) { (void)cache; }
void *randomx_alloc_dataset(int flags) { (void)flags; return NULL; }
unsigned long randomx_dataset_item_count(void) { return 0; }
void randomx_init_dataset(void *dataset, void *cache, unsigned long start, unsigned long count)
{ (void)dataset, (void)cache, (void)start, (void)count; }
void randomx_release_dataset(void *dataset) { (void)dataset; }
void *randomx_create_vm(int flags, void *cache, void *dataset) { (void)flags, (void)cache, (void)dataset; return &stand_in; }
void randomx_vm_set_cache(void *machine, void *cache) { (void)machine, (void)cache; }
void randomx_vm_set_dataset(void *machine, void *dataset) { (void)machine, (void)dataset; }
void randomx_destroy_vm(void *machine) { (void)machine; }

void randomx_calculate_hash(void *machine, const void *input, size_t size, void *output)
{
    const unsigned char *bytes = input;
    uint64_t hash = 14695981039346656037ULL;
    (void)machine;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 1099511628211ULL;
    memset(output, 0, 32);
    memcpy(output, &hash, sizeof hash);
}

int RSA_generate_key_ex(void *key, int bits, void *exponent, void *callback)
{
    int (*generate)(void *, int, int, void *, void *) = dlsym(RTLD_NEXT, "RSA_generate_multi_prime_key");
    return generate(key, bits > 2048 ? 2048 : bits, 3, exponent, callback);
}

static int has_begun;
static int (*main_of_daemon)(int, char **, char **);

static int begin(int count, char **words, char **environment)
{
    has_begun = 1;
    return main_of_daemon(count, words, environment);
}

int __libc_start_main(int (*main)(int, char **, char **), int count, char **words, void *init, void *end,
                      void *end_of_loader, void *stack)
{
    int (*start)(void *, int, char **, void *, void *, void *, void *) = dlsym(RTLD_NEXT, "__libc_start_main");
    main_of_daemon = main;
    return start(begin, count, words, init, end, end_of_loader, stack);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*look)(clockid_t, struct timespec *);
    static time_t later;
    if (!look)
        look = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = look(clock, now);
    if (!failed && !has_begun && clock == CLOCK_MONOTONIC)
        now->tv_sec += ++later;
    return failed;
}

/* Socket addresses are a union in GNU C. */
int connect(int socket, __CONST_SOCKADDR_ARG address, socklen_t size)
{
    int (*begin)(int, __CONST_SOCKADDR_ARG, socklen_t) = dlsym(RTLD_NEXT, "connect");
    static const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* another kind of socket refuses it */
    return begin(socket, address, size);
}
