-- Counts one request's use of quotas. ARGV: tenant, request, taker, lease in ms or 0 if the request has ended, then for
-- each quota: name, the sum that the request has used so far, limit, period in ms or 0 for a quota of what is in use,
-- 1 if the use must fit. A quota with a period is a token bucket of size `limit`, which fills in one period; a use that
-- need not fit may leave it below zero. Sums are remembered while the lease runs, so a repeated take changes nothing.
local tenant, request, taker, lease_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local quotas, takes, leases = quotas_key(tenant), quota_takes_key(tenant), quota_leases_key(tenant)
local now = now_ms()
local KEPT_MS, TAKER_MS, MOST_LAPSED = 86400000, 60000, 256

local function number_of(field) return tonumber(redis.call('HGET', quotas, field) or '') end

local function give_back(id)
  local entry = redis.call('HGET', takes, id)
  if entry then
    for quota, amount in pairs(cjson.decode(entry).held) do
      redis.call('HINCRBY', quotas, 'held ' .. quota, 0 - amount)
    end
    redis.call('HDEL', takes, id)
  end
  redis.call('ZREM', leases, id)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%.0f', now), 'LIMIT', 0, MOST_LAPSED)) do
  -- The present request is still running.
  if id ~= request then give_back(id) end
end

if lease_ms == 0 then
  give_back(request)
  return {'ok', redis.call('ZCARD', TAKERS)}
end

local entry = redis.call('HGET', takes, request)
local taken = entry and cjson.decode(entry) or {spent = {}, held = {}}
local changes = {}
for at = 5, #ARGV, 5 do
  local quota, amount, limit, period = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local must_fit = ARGV[at + 4] == '1'
  if period > 0 then
    local more = math.max(0, amount - (taken.spent[quota] or 0))
    local level, since = number_of('level ' .. quota) or limit, number_of('since ' .. quota) or now
    -- If the clock was set back, nothing is filled.
    level = math.min(limit, level + math.max(0, now - since) * limit / period)
    -- An amount larger than the bucket needs a full bucket.
    local needed = math.min(more, limit)
    if must_fit and more > 0 and level < needed then
      return {'quota', quota, string.format('%.0f', math.ceil((needed - level) * period / limit))}
    end
    changes[#changes + 1] = {'level ' .. quota, string.format('%.6f', level - more)}
    changes[#changes + 1] = {'since ' .. quota, string.format('%.0f', now)}
    taken.spent[quota] = (taken.spent[quota] or 0) + more
  else
    local more = amount - (taken.held[quota] or 0)
    local held = number_of('held ' .. quota) or 0
    if must_fit and more > 0 and held + more > limit then return {'quota', quota, '0'} end
    changes[#changes + 1] = {'held ' .. quota, string.format('%.0f', held + more)}
    taken.held[quota] = amount
  end
end

for _, change in ipairs(changes) do redis.call('HSET', quotas, change[1], change[2]) end
redis.call('HSET', takes, request, cjson.encode(taken))
redis.call('ZADD', leases, string.format('%.0f', now + lease_ms), request)
for _, key in ipairs({quotas, takes, leases}) do redis.call('PEXPIRE', key, KEPT_MS) end
redis.call('ZADD', TAKERS, string.format('%.0f', now), taker)
redis.call('ZREMRANGEBYSCORE', TAKERS, '-inf', string.format('%.0f', now - TAKER_MS))
redis.call('PEXPIRE', TAKERS, TAKER_MS)
return {'ok', redis.call('ZCARD', TAKERS)}
