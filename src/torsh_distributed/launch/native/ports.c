/* Keeps listening ports inside a range, in processes that are started with this library in LD_PRELOAD.
 *
 * Why a library: gloo, nccl and MPI open their own sockets on port 0, which means any port, and none of them can be told
 * otherwise. A bind to port 0 of a TCP socket takes a port of TORSH_PORT_RANGE ("29500-29599") instead; every other
 * bind is left alone. Without the variable nothing changes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int (*bind_function)(int, const struct sockaddr *, socklen_t);

static int read_range(unsigned *first, unsigned *last)
{
    const char *text = getenv("TORSH_PORT_RANGE");
    return text && sscanf(text, "%u-%u", first, last) == 2 && *first && *first <= *last && *last < 65536;
}

static int is_tcp_on_any_port(int fd, const struct sockaddr *address, socklen_t length)
{
    int type = 0;
    socklen_t size = sizeof type;
    if (!address || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM)
        return 0;
    if (address->sa_family == AF_INET && length >= sizeof(struct sockaddr_in))
        return ((const struct sockaddr_in *)address)->sin_port == 0;
    if (address->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6))
        return ((const struct sockaddr_in6 *)address)->sin6_port == 0;
    return 0;
}

static int bind_in_range(bind_function next, int fd, const struct sockaddr *address, socklen_t length,
                         unsigned first, unsigned last)
{
    struct sockaddr_storage chosen;
    unsigned count = last - first + 1, start = (unsigned)getpid() * 7u % count;
    int result = -1;
    memcpy(&chosen, address, length);
    for (unsigned index = 0; index < count && result; index++) {
        unsigned port = first + (start + index) % count;
        if (chosen.ss_family == AF_INET)
            ((struct sockaddr_in *)&chosen)->sin_port = htons((unsigned short)port);
        else
            ((struct sockaddr_in6 *)&chosen)->sin6_port = htons((unsigned short)port);
        result = next(fd, (struct sockaddr *)&chosen, length);
        if (result && errno != EADDRINUSE)
            break;
    }
    return result;
}

__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr *address, socklen_t length)
{
    static bind_function next;
    unsigned first, last;
    if (!next)
        next = (bind_function)dlsym(RTLD_NEXT, "bind");
    if (length > sizeof(struct sockaddr_storage) || !is_tcp_on_any_port(fd, address, length) ||
        !read_range(&first, &last))
        return next(fd, address, length);
    /* With SO_REUSEADDR two sockets may share a port until one listens: without it the second is refused here. */
    int reuse = 0, off = 0, problem;
    socklen_t size = sizeof reuse;
    getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, &size);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &off, sizeof off);
    int result = bind_in_range(next, fd, address, length, first, last);
    problem = errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
    errno = problem;
    return result;
}
